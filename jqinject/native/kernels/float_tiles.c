/* Floats times stored numbers (int8, or in 4 bits): many rows, with AVX-512.
 *
 * A lane is a column. A tile is 12, 8 or 4 rows times two vectors of columns, whose sums stay in registers over
 * FLOAT_DEPTH: each number of lhs is broadcast and multiplied by both vectors. Before it, two stripes of 16 columns become
 * floats, scales and zero points included, and stay in the first-level cache while all rows of a block of lhs pass, which
 * is laid out tile by tile, the rows of a tile side by side (see lay_out_tiles), and stays in the second-level cache.
 *
 * To unpack, 16 words of 16 columns are turned at once: a vector then has the same word of all columns, 8 numbers in 4
 * bits or 4 bytes.
 */
#include "avx512.h"

#if defined(__x86_64__)

enum { VECTOR = 16, PANEL = 2 * STRIPE, LONGEST = TILE_ROWS_OF_FLOATS };

INLINED void tile(const int rows, const float* lhs, const float* rhs, int64_t depth, float* y, int64_t stride,
                  const __mmask16* kept, int add) {
  __m512 sums[LONGEST][2];
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < 2; j++) sums[i][j] = _mm512_setzero_ps();
  for (; depth > 0; depth--, lhs += rows, rhs += PANEL) {
    const __m512 first = _mm512_load_ps(rhs), second = _mm512_load_ps(rhs + VECTOR);
    UNROLLED(int i = 0; i < rows; i++) {
      const __m512 x = _mm512_set1_ps(lhs[i]);
      sums[i][0] = _mm512_fmadd_ps(x, first, sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(x, second, sums[i][1]);
    }
  }
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < 2; j++) {
    float* place = y + i * stride + j * VECTOR;
    if (add) sums[i][j] = _mm512_add_ps(sums[i][j], _mm512_maskz_loadu_ps(kept[j], place));
    _mm512_mask_storeu_ps(place, kept[j], sums[i][j]);
  }
}

/* A tile of which `rows` exist: what is stored of the last one is cut off. */
#define TILE(height)                                                                                                  \
  static VNNI __attribute__((noinline)) void tile_##height(const float* lhs, const float* rhs, int64_t depth, float* y, \
                                                           int64_t stride, const __mmask16* kept, int add,            \
                                                           int64_t rows) {                                            \
    if (rows == height) {                                                                                             \
      tile(height, lhs, rhs, depth, y, stride, kept, add);                                                            \
      return;                                                                                                         \
    }                                                                                                                 \
    float all[height * PANEL];                                                                                        \
    const __mmask16 whole[2] = {0xffff, 0xffff};                                                                      \
    tile(height, lhs, rhs, depth, all, PANEL, whole, 0);                                                              \
    for (int64_t i = 0; i < rows; i++)                                                                                \
      for (int j = 0; j < 2; j++) {                                                                                   \
        float* place = y + i * stride + j * VECTOR;                                                                   \
        const __m512 known = add ? _mm512_maskz_loadu_ps(kept[j], place) : _mm512_setzero_ps();                       \
        _mm512_mask_storeu_ps(place, kept[j], _mm512_add_ps(known, _mm512_loadu_ps(all + i * PANEL + j * VECTOR)));   \
      }                                                                                                               \
  }
TILE(4)
TILE(8)
TILE(12)

/* A word of each column as floats: 8 vectors or 4. */
INLINED void unpack_word(const int four_bits, __m512i word, __m512 table, __m512 scale, __m512 zero, float* to) {
  const int count = four_bits ? 8 : 4;
  UNROLLED(int n = 0; n < count; n++) {
    __m512 w;
    if (four_bits)
      w = _mm512_permutexvar_ps(_mm512_srli_epi32(word, 4 * n), table);
    else
      w = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24 - 8 * n), 24));
    _mm512_store_ps(to + n * PANEL, _mm512_mul_ps(_mm512_sub_ps(w, zero), scale));
  }
}

/* Steps [step, end) of a stripe whose scales and zero points these are. */
INLINED void unpack_stripe(const int four_bits, const product* p, stripe s, int64_t step, int64_t end,
                           group_numbers scales, group_numbers zeros, float* to) {
  const int count = four_bits ? 8 : 4;
  const int64_t bytes = four_bits ? (p->depth + 1) / 2 : p->depth;
  const __m512 table = four_bits ? _mm512_loadu_ps(p->values) : _mm512_setzero_ps();
  int64_t group = 0, left = (s.group + 1) * p->group - step * 16 * count;
  for (; step < end; step++) {
    __m512 words[16];
    for (int j = 0; j < 16; j++) {
      const uint8_t* row = (const uint8_t*)p->rhs + (s.column + at_most(j, s.columns - 1)) * p->rhs_stride;
      words[j] = _mm512_castsi512_ps(packed_line(row, step * LINE, bytes));
      _mm_prefetch((const char*)row + STRIPE * p->rhs_stride + step * LINE, _MM_HINT_T1);
    }
    turn(words);
    for (int n = 0; n < 16; n++, to += count * PANEL) {
      const int64_t own = at_most(group, s.groups - 1) * STRIPE; /* the last step may go on behind the groups */
      const __m512 zero = zeros.first == NULL ? _mm512_setzero_ps() : _mm512_loadu_ps(zeros.first + own);
      unpack_word(four_bits, _mm512_castps_si512(words[n]), table, _mm512_loadu_ps(scales.first + own), zero, to);
      if ((left -= count) <= 0) left = p->group, group++;
    }
  }
}

static VNNI void unpack(const product* p, int64_t column, int64_t columns, int64_t step, int64_t end, float* of_groups,
                        float* to) {
  const int64_t size = p->four_bits ? 128 : 64, first = step * size / p->group;
  const int64_t last = at_most((end * size - 1) / p->group, p->groups - 1);
  const stripe s = {column, columns, first, last + 1 - first};
  const group_numbers scales = read_stripe(p, p->scale, GROUP_BY_GROUP, s, of_groups);
  const group_numbers zeros = read_stripe(p, p->zero, GROUP_BY_GROUP, s, of_groups + STRIPE * stripe_stride(p));
  if (p->four_bits)
    unpack_stripe(1, p, s, step, end, scales, zeros, to);
  else
    unpack_stripe(0, p, s, step, end, scales, zeros, to);
}

VNNI void float_tiles(const product* p, const block* b, uint8_t* scratch) {
  float *unpacked = (float*)scratch, *of_groups = unpacked + PANEL * FLOAT_DEPTH;
  const int64_t size = p->four_bits ? 128 : 64, at_once = FLOAT_DEPTH / size, depth = p->steps * size;
  for (int64_t step = 0; step < p->steps; step += at_once) {
    const int64_t end = at_most(step + at_once, p->steps);
    for (int64_t j = b->column; j < b->column_end; j += PANEL) {
      const int64_t columns = at_most(b->column_end - j, PANEL), first = at_most(columns, STRIPE);
      const __mmask16 kept[2] = {(__mmask16)((1 << first) - 1), (__mmask16)((1 << (columns - first)) - 1)};
      unpack(p, j, first, step, end, of_groups, unpacked);
      if (columns > STRIPE) unpack(p, j + STRIPE, columns - STRIPE, step, end, of_groups, unpacked + STRIPE);
      for (int64_t i = b->row, rows; i < b->row_end; i += rows) {
        const int64_t height = tile_height(p->rows - i);
        const float* lhs = (const float*)p->laid_out + i * depth + step * size * height;
        rows = at_most(height, b->row_end - i);
        (height == 4   ? tile_4
         : height == 8 ? tile_8
                       : tile_12)(lhs, unpacked, (end - step) * size, p->y + i * p->columns + j, p->columns, kept,
                                  step > 0, rows);
      }
    }
  }
}

#endif
