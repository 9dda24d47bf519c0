/* Rows of lhs laid out for a call, so that a kernel reads them in the order in which it unpacks rhs.
 *
 * A step is what 64 bytes of rhs hold: 64 int8 or 128 numbers in 4 bits. Zeros fill up the last step.
 *
 * Few rows of floats, rhs int8: as they lie. Few rows of floats, rhs in 4 bits: 8 vectors of 16, the n-th of which has the numbers n, n + 8,
 * n + 16, ... of the step, because shifting 16 words of 8 indices makes these. Bytes, rhs int8: as they lie. Bytes, rhs
 * in 4 bits: those at even places, then those at odd ones.
 *
 * Many rows of floats: tile by tile of 12 rows, the last one of 8 or 4 where that is enough, zero beyond the rows; the
 * numbers of a tile's rows at one place of the depth lie side by side.
 *
 * Each of the 16 lanes of what a kernel sums then has the same numbers of every step: neighbours, 8 of a step of 128 or 4
 * of a step of 64; but floats beside int8 every 16th. In groups, and where rhs has zero points, the sums of the lanes are
 * needed too, 16 for each step: `sums`.
 */
#include "layout.h"

#include <string.h>

#include "avx512.h"

#if defined(__x86_64__)

enum { LANES = 16 };

static VNNI void float_step(const float* from, int four_bits, float* to, float* sums) {
  const int vectors = four_bits ? 8 : 4;
  if (four_bits)
    UNROLLED(int n = 0; n < 8; n++) UNROLLED(int lane = 0; lane < LANES; lane++) to[n * LANES + lane] = from[lane * 8 + n];
  else
    memcpy(to, from, 4 * LANES * sizeof(float));
  if (sums == NULL) return;
  __m512 sum = _mm512_load_ps(to);
  for (int n = 1; n < vectors; n++) sum = _mm512_add_ps(sum, _mm512_load_ps(to + n * LANES));
  _mm512_store_ps(sums, sum);
}

void lay_out_floats(const float* from, int64_t rows, int64_t depth, int four_bits, float* to, float* sums) {
  const int64_t size = four_bits ? 128 : 64;
  for (int64_t i = 0; i < rows; i++, from += depth)
    for (int64_t t = 0; t < depth; t += size, to += size) {
      if (depth - t < size) {
        float last[128] = {0};
        memcpy(last, from + t, (size_t)(depth - t) * sizeof(float));
        float_step(last, four_bits, to, sums);
      } else {
        float_step(from + t, four_bits, to, sums);
      }
      if (sums != NULL) sums += LANES;
    }
}

void lay_out_tiles(const float* from, int64_t rows, int64_t depth, int64_t padded, float* to) {
  for (int64_t i = 0, height; i < rows; i += height, from += height * depth, to += height * padded) {
    height = tile_height(rows - i);
    const int64_t known = at_most(height, rows - i);
    if (known < height || depth < padded) memset(to, 0, (size_t)(height * padded) * sizeof(float));
    for (int64_t line = 0; line < depth; line += LANES)
      for (int64_t n = 0; n < known; n++)
        for (int64_t t = line; t < at_most(line + LANES, depth); t++) to[t * height + n] = from[n * depth + t];
  }
}

/* The even bytes of two lines that follow each other, then the odd ones. */
INLINED void byte_pairs(__m512i* lines) {
  const __m512i low = _mm512_set1_epi16(0xff), quarters = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i even = _mm512_packus_epi16(_mm512_and_si512(lines[0], low), _mm512_and_si512(lines[1], low));
  const __m512i odd = _mm512_packus_epi16(_mm512_srli_epi16(lines[0], 8), _mm512_srli_epi16(lines[1], 8));
  lines[0] = _mm512_permutexvar_epi64(quarters, even);
  lines[1] = _mm512_permutexvar_epi64(quarters, odd);
}

VNNI void lay_out_bytes(const int8_t* from, int64_t rows, int64_t depth, int four_bits, int8_t* to, byte_sums found) {
  const int64_t count = four_bits ? 2 : 1;
  const __m512i ones = _mm512_set1_epi8(1), least = _mm512_set1_epi32(found.least);
  for (int64_t i = 0; i < rows; i++, from += depth)
    for (int64_t t = 0; t < depth; t += count * LINE, to += count * LINE) {
      const int64_t left = depth - t;
      __m512i lines[2] = {line_of(from + t, left), _mm512_setzero_si512()}, sum = _mm512_setzero_si512();
      if (left > LINE && four_bits) lines[1] = line_of(from + t + LINE, left - LINE);
      if (four_bits) byte_pairs(lines);
      for (int n = 0; n < count; n++) {
        _mm512_store_si512(to + n * LINE, lines[n]);
        ADD_PRODUCTS(sum, ones, lines[n]);
      }
      if (found.sums == NULL) continue;
      _mm512_store_ps(found.sums, _mm512_cvtepi32_ps(sum));
      _mm512_store_si512(found.offsets, _mm512_mullo_epi32(sum, least));
      found.sums += LANES, found.offsets += LANES;
    }
}

void lay_out_scales(const float* from, int64_t rows, int64_t groups, int64_t group, int64_t steps, int size, float* to) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t lane = 0; lane < steps * LANES; lane++) {
      const int64_t found = groups == 1 ? 0 : at_most(lane * (size / LANES) / group, groups - 1);
      *to++ = from[i * groups + found];
    }
}

#endif
