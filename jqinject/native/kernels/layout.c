/* Rows of lhs laid out for a call, so that a kernel reads them in the order in which it unpacks rhs.
 *
 * A step is what a line of rhs holds: LINE int8 or twice as many numbers in 4 bits. Zeros fill up the last step.
 *
 * Few rows of floats, rhs int8: as they lie. Few rows of floats, rhs in 4 bits: 8 vectors, the n-th of which has the
 * numbers n, n + 8, n + 16, ... of the step, because shifting words of 8 indices makes these. Bytes, rhs int8: as they
 * lie. Bytes, rhs in 4 bits: those at even places, then those at odd ones.
 *
 * Many rows of floats: tile by tile, the last one lower where that is enough, zero beyond the rows; the numbers of a
 * tile's rows at one place of the depth lie side by side.
 *
 * Many rows of bytes, with AVX-512: tile by tile likewise, four numbers of each row side by side as a word; beside rhs in
 * 4 bits those of four even places, then of four odd ones. For each piece of the depth the sums of the tile's rows follow
 * each other.
 *
 * Each lane of what other kernels sum then has the same numbers of every step: neighbours, 8 in 4 bits or 4 bytes; but
 * floats beside int8 one of each vector. In groups, and where rhs has zero points, the sums of the lanes are needed too, LANES
 * for each step: `sums`. Those of a group of bytes that fills several steps stand at its first step.
 */
#include "layout.h"

#include <string.h>

#include "vectors.h"

#if defined(__x86_64__)

static TARGET void float_step(const float* from, int four_bits, float* to, float* sums) {
  const int vectors = four_bits ? 8 : 4;
  if (four_bits)
    UNROLLED(int n = 0; n < 8; n++) UNROLLED(int lane = 0; lane < LANES; lane++) to[n * LANES + lane] = from[lane * 8 + n];
  else
    memcpy(to, from, 4 * LANES * sizeof(float));
  if (sums == NULL) return;
  fvec sum = V(load_ps)(to);
  for (int n = 1; n < vectors; n++) sum = V(add_ps)(sum, V(load_ps)(to + n * LANES));
  V(store_ps)(sums, sum);
}

TARGET void NAMED(lay_out_floats)(const float* from, int64_t rows, int64_t depth, int four_bits, float* to, float* sums) {
  const int64_t size = four_bits ? 2 * LINE : LINE;
  for (int64_t i = 0; i < rows; i++, from += depth)
    for (int64_t t = 0; t < depth; t += size, to += size) {
      if (depth - t < size) {
        float last[2 * LINE] = {0};
        memcpy(last, from + t, (size_t)(depth - t) * sizeof(float));
        float_step(last, four_bits, to, sums);
      } else {
        float_step(from + t, four_bits, to, sums);
      }
      if (sums != NULL) sums += LANES;
    }
}

/* Four numbers of each of `rows` rows become four of each place of a tile: two rows or four side by side. */
INLINED void turn_fours(const int rows, const float* from, int64_t depth, float* to, int64_t height) {
  __m128 v[4];
  UNROLLED(int n = 0; n < rows; n++) v[n] = _mm_loadu_ps(from + n * depth);
  if (rows == 4) {
    _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
    UNROLLED(int n = 0; n < 4; n++) _mm_storeu_ps(to + n * height, v[n]);
    return;
  }
  const __m128 low = _mm_unpacklo_ps(v[0], v[1]), high = _mm_unpackhi_ps(v[0], v[1]);
  _mm_storel_pi((__m64*)to, low), _mm_storeh_pi((__m64*)(to + height), low);
  _mm_storel_pi((__m64*)(to + 2 * height), high), _mm_storeh_pi((__m64*)(to + 3 * height), high);
}

TARGET void NAMED(lay_out_tiles)(const float* from, int64_t rows, int64_t depth, int64_t padded, float* to) {
  const int64_t fours = depth / 4 * 4;
  for (int64_t i = 0, height; i < rows; i += height, from += height * depth, to += height * padded) {
    height = tile_height(rows - i);
    const int64_t known = at_most(height, rows - i);
    if (known < height || depth < padded) memset(to, 0, (size_t)(height * padded) * sizeof(float));
    for (int64_t t = 0; t < fours; t += 4) {
      int64_t n = 0;
      for (; n + 4 <= known; n += 4) turn_fours(4, from + n * depth + t, depth, to + t * height + n, height);
      if (n + 2 <= known) turn_fours(2, from + n * depth + t, depth, to + t * height + n, height), n += 2;
      if (n < known)
        for (int64_t k = t; k < t + 4; k++) to[k * height + n] = from[n * depth + k];
    }
    for (int64_t t = fours; t < depth; t++)
      for (int64_t n = 0; n < known; n++) to[t * height + n] = from[n * depth + t];
  }
}

TARGET void NAMED(lay_out_bytes)(const product* p, const int8_t* from, int64_t rows, int8_t* start, byte_sums found) {
  const unsigned_form form = unsigned_form_of(p);
  const int four_bits = p->four_bits;
  const int64_t count = four_bits ? 2 : 1;
  const ivec least = V(set1_epi32)(form.least);
  for (int64_t i = 0; i < rows; i++, from += p->depth) {
    int8_t* to = start + i * p->laid_out_stride;
    ivec sum = no_integers();
    byte_sums of_group = found;
    uint32_t left_of_group = 0; /* steps */
    for (int64_t t = 0; t < p->depth; t += count * LINE) {
      const int64_t left = p->depth - t;
      ivec lines[2] = {line_of(from + t, left), no_integers()};
      if (left > LINE && four_bits) lines[1] = line_of(from + t + LINE, left - LINE);
      if (four_bits) byte_pairs(lines);
      const int8_t* own = to;
      for (int n = 0; n < count; n++, to += LINE) store_line(to, lines[n]);
      if (found.sums == NULL) continue;
      if (left_of_group-- == 0) {
        left_of_group = p->steps_a_group > 0 ? p->steps_a_group - 1 : 0;
        of_group = found, sum = no_integers();
      }
      sum = V(add_epi32)(sum, four_bits ? sum_of_lanes(OF_FOUR_BITS, own) : sum_of_lanes(BYTES, own));
      V(store_ps)(of_group.sums, V(cvtepi32_ps)(sum));
      store_line(of_group.offsets, V(mullo_epi32)(sum, least));
      found.sums += LANES, found.offsets += LANES;
    }
  }
}

#ifndef WITH_AVX2

/* The words of up to 16 rows at a step, four numbers each: vector n has the n-th word of all rows, of rhs in 4 bits those
 * of four even places and of four odd ones in turn. */
INLINED int words_of_step(const product* p, const int8_t* from, int64_t rows, int64_t left, fvec* words) {
  fvec halves[2][LANES];
  for (int64_t i = 0; i < LANES; i++) {
    ivec lines[2] = {no_integers(), no_integers()};
    if (i < rows) lines[0] = line_of(from + i * p->depth, left);
    if (i < rows && p->four_bits && left > LINE) lines[1] = line_of(from + i * p->depth + LINE, left - LINE);
    if (p->four_bits) byte_pairs(lines);
    halves[0][i] = as_floats(lines[0]), halves[1][i] = as_floats(lines[1]);
  }
  const int count = p->four_bits ? 2 : 1;
  for (int half = 0; half < count; half++) turn(halves[half]);
  for (int n = 0; n < LANES; n++)
    for (int half = 0; half < count; half++) words[n * count + half] = halves[half][n];
  return count * LANES;
}

static TARGET void byte_tile(const product* p, const int8_t* from, int64_t height, int64_t rows, const float* scales,
                             int8_t* to, piece_numbers found) {
  const int64_t step = p->four_bits ? 2 * LINE : LINE;
  const ivec ones = V(set1_epi8)(1), least = V(set1_epi32)(unsigned_form_of(p).least);
  const lane_mask kept = first_lanes(height);
  ivec sum = no_integers();
  int64_t piece = 0, left = vectors_of_piece(p, 0);
  for (int64_t t = 0; t < p->depth; t += step) {
    fvec words[2 * LANES];
    const int count = words_of_step(p, from + t, rows, p->depth - t, words);
    for (int n = 0; n < count; n++, to += 4 * height) {
      V(mask_storeu_ps)(to, kept, words[n]);
      ADD_PRODUCTS(sum, ones, as_integers(words[n]));
      if (--left > 0 || piece == p->pieces) continue;
      V(mask_storeu_epi32)(found.offsets + piece * height, kept, V(mullo_epi32)(sum, least));
      V(mask_storeu_ps)(found.sums + piece * height, kept, V(cvtepi32_ps)(sum));
      for (int64_t i = 0; found.scales != NULL && i < height; i++)
        found.scales[piece * height + i] = i < rows ? scales[i * p->groups + piece / p->pieces_a_group] : 0;
      sum = no_integers();
      if (++piece < p->pieces) left = vectors_of_piece(p, piece);
    }
  }
}

TARGET void lay_out_byte_tiles(const product* p, const int8_t* from, int64_t rows, const float* scales, int8_t* to,
                               piece_numbers found) {
  for (int64_t i = 0, height; i < rows; i += height) {
    height = byte_tile_height(rows - i);
    byte_tile(p, from + i * p->depth, height, at_most(height, rows - i), scales == NULL ? NULL : scales + i * p->groups,
              to + i * p->laid_out_stride, found);
    found.offsets += height * p->pieces, found.sums += height * p->pieces;
    if (found.scales != NULL) found.scales += height * p->pieces;
  }
}

#endif
#endif
