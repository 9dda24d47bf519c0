/* Floats times stored numbers (int8, or in 4 bits): at most FEW_FLOAT_ROWS rows, with AVX-512.
 *
 * rhs is read once, as it lies, and becomes floats in registers. Of 4 bits, 64 bytes are 16 words of 8 indices: shifted
 * right by 4 n, the lowest bits of each word are its n-th index, by which one permutation takes 16 numbers of the table.
 * lhs is laid out in that order (see layout.c) and stays in the first-level cache.
 *
 * A tile is all rows times two columns, whose sums of 16 lanes stay in registers. The sums of a step are multiplied by
 * the scales of the lanes' groups and added to those of the whole depth. Of int8 in groups below 64, where the lanes of
 * one sum have several groups, the numbers themselves are scaled.
 */
#include "avx512.h"

#if defined(__x86_64__)

enum { COLUMNS = 2 };
/* In 4 bits where groups fill whole steps, and where steps have several; int8, and that in groups below 64. */
typedef enum { FOUR_BITS, FOUR_BITS_IN_PARTS, INT8, SCALED_INT8 } kind;

/* The numbers of vector n of a step. */
INLINED __m512 numbers_of(const kind kind, __m512i packed, const uint8_t* line, int64_t left, int n, __m512 table) {
  if (kind <= FOUR_BITS_IN_PARTS) return _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 4 * n), table);
  const int64_t rest = left - 16 * n;
  const __mmask16 kept = rest >= 16 ? 0xffff : rest <= 0 ? 0 : (__mmask16)(0xffff >> (16 - rest));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(kept, line + 16 * n)));
}

INLINED void tile(const kind kind, const int rows, const int columns, const product* p, int64_t column,
                  group_numbers scales, group_numbers zeros) {
  const int four_bits = kind <= FOUR_BITS_IN_PARTS, whole_steps = kind != FOUR_BITS_IN_PARTS;
  const int vectors = four_bits ? 8 : 4, span = 16 * vectors;
  const int64_t bytes = four_bits ? (p->depth + 1) / 2 : p->depth, row_size = p->steps * span;
  const __m512 table = four_bits ? _mm512_loadu_ps(p->values) : _mm512_setzero_ps();
  const float* x = p->laid_out;
  const __m512i places = groups_of_lanes(p);
  __m512 sums[COLUMNS][FEW_FLOAT_ROWS];
  UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++) sums[j][i] = _mm512_setzero_ps();
  group_place at = first_group(p);
  for (int64_t step = 0; step < p->steps; step++, x += span, at = next_group(p, at)) {
    __m512i packed[COLUMNS];
    __m512 part[COLUMNS][FEW_FLOAT_ROWS];
    const uint8_t* line[COLUMNS];
    UNROLLED(int j = 0; j < columns; j++) {
      const uint8_t* row = (const uint8_t*)p->rhs + (column + j) * p->rhs_stride;
      line[j] = row + step * LINE;
      _mm_prefetch((const char*)line[j] + columns * p->rhs_stride, _MM_HINT_T0);
      if (four_bits) packed[j] = packed_line(row, step * LINE, bytes);
      UNROLLED(int i = 0; i < rows; i++) part[j][i] = _mm512_setzero_ps();
    }
    UNROLLED(int n = 0; n < vectors; n++) UNROLLED(int j = 0; j < columns; j++) {
      __m512 w = numbers_of(kind, packed[j], line[j], bytes - step * LINE, n, table);
      if (kind == SCALED_INT8) {
        const int64_t place = j * scales.column + group_of_vector(p, at.first, n) * scales.group;
        if (zeros.first != NULL) w = _mm512_sub_ps(w, _mm512_set1_ps(zeros.first[place]));
        w = _mm512_mul_ps(w, _mm512_set1_ps(scales.first[place]));
      }
      UNROLLED(int i = 0; i < rows; i++)
      part[j][i] = _mm512_fmadd_ps(w, _mm512_load_ps(x + i * row_size + 16 * n), part[j][i]);
    }
    UNROLLED(int j = 0; j < columns; j++) {
      if (kind == SCALED_INT8) {
        UNROLLED(int i = 0; i < rows; i++) sums[j][i] = _mm512_add_ps(sums[j][i], part[j][i]);
        continue;
      }
      const __m512 scale = of_lanes(whole_steps, scales, j, at.first, places);
      if (zeros.first != NULL) {
        const __m512 zero = of_lanes(whole_steps, zeros, j, at.first, places);
        UNROLLED(int i = 0; i < rows; i++)
        part[j][i] =
            _mm512_fnmadd_ps(zero, _mm512_load_ps(p->lane_sums + (i * p->steps + step) * 16), part[j][i]);
      }
      UNROLLED(int i = 0; i < rows; i++) sums[j][i] = _mm512_fmadd_ps(part[j][i], scale, sums[j][i]);
    }
  }
  UNROLLED(int j = 0; j < columns; j++)
  UNROLLED(int i = 0; i < rows; i++) p->y[i * p->columns + column + j] = _mm512_reduce_add_ps(sums[j][i]);
}

#define ROWS_OF(kind, rows)                                                                                       \
  static VNNI __attribute__((noinline)) void kind##_##rows(const product* p, int64_t column, int64_t end,         \
                                                           group_numbers scales, group_numbers zeros) {             \
    for (int64_t j = column; j < end; j += COLUMNS) {                                                             \
      const group_numbers own = from_column(scales, j - column), own_zeros = from_column(zeros, j - column);      \
      if (j + COLUMNS <= end)                                                                                     \
        tile(kind, rows, COLUMNS, p, j, own, own_zeros);                                                          \
      else                                                                                                        \
        tile(kind, rows, 1, p, j, own, own_zeros);                                                                \
    }                                                                                                             \
  }
#define ROWS(kind) ROWS_OF(kind, 1) ROWS_OF(kind, 2) ROWS_OF(kind, 3) ROWS_OF(kind, 4)
ROWS(FOUR_BITS)
ROWS(FOUR_BITS_IN_PARTS)
ROWS(INT8)
ROWS(SCALED_INT8)

#define CHOICE(kind) {kind##_1, kind##_2, kind##_3, kind##_4}

/* A block has all rows. */
void float_rows(const product* p, const block* b, uint8_t* scratch) {
  static void (*const choices[4][FEW_FLOAT_ROWS])(const product*, int64_t, int64_t, group_numbers, group_numbers) = {
      CHOICE(FOUR_BITS), CHOICE(FOUR_BITS_IN_PARTS), CHOICE(INT8), CHOICE(SCALED_INT8)};
  const kind kind = !p->four_bits          ? p->groups_a_step == 0 ? INT8 : SCALED_INT8
                    : p->groups_a_step == 0 ? FOUR_BITS
                                            : FOUR_BITS_IN_PARTS;
  float* of_zeros = (float*)scratch + STRIPE * stripe_stride(p);
  for (int64_t j = b->column; j < b->column_end; j += STRIPE) {
    const int64_t end = at_most(j + STRIPE, b->column_end);
    const group_numbers scales = stripe_of(p, p->scale, j, end - j, (float*)scratch);
    const group_numbers zeros = stripe_of(p, p->zero, j, end - j, of_zeros);
    choices[kind][b->row_end - b->row - 1](p, j, end, scales, zeros);
  }
}

#endif
