/* int8 times int8 or numbers in 4 bits, in groups along the depth, with the dot product instruction of AVX-512 VNNI.
 *
 * A step is 64 bytes of rhs. Each lane of its sums belongs to one group (see layout.c); the sums of a step, exact
 * integers, are multiplied by the scales of the lanes' groups and added up in float32. What makes rhs the instruction's
 * unsigned operand (its least number is taken off) is put on again beforehand: the sums begin with `lane_offsets`.
 * Zero points are taken off lane by lane, exact as well.
 *
 * A tile is 4 rows times 2 columns, whose sums stay in registers over the whole depth. Two rows of rhs stay in the
 * first-level cache while all rows of a block of lhs pass, which stays in the second-level cache.
 */
#include "avx512.h"

#if defined(__x86_64__)

enum { ROWS = 4, COLUMNS = 2, COLUMNS_OF_ONE = 4, BOTH = COLUMNS * ROWS };

/* One step of rhs as unsigned bytes: one line of bytes, or two of numbers in 4 bits. */
INLINED void unsigned_step(const int four_bits, const uint8_t* row, int64_t step, int64_t bytes, __m512i table,
                           __m512i* lines) {
  const __m512i packed = packed_line(row, step * LINE, bytes);
  if (!four_bits) {
    lines[0] = _mm512_xor_si512(packed, _mm512_set1_epi8((char)0x80));
    return;
  }
  split_halves(packed, &lines[0], &lines[1]);
  lines[0] = _mm512_shuffle_epi8(table, lines[0]), lines[1] = _mm512_shuffle_epi8(table, lines[1]);
}

INLINED void tile(const int four_bits, const int rows, const int columns, const product* p, int64_t row, int64_t column,
                  __m512i table, group_numbers scales, group_numbers zeros) {
  const int lines = four_bits ? 2 : 1, span = lines * LINE;
  const int64_t bytes = four_bits ? (p->depth + 1) / 2 : p->depth, lanes = row * p->steps * 16;
  const int8_t* x = (const int8_t*)p->laid_out + row * p->steps * span;
  __m512 sums[BOTH];
  UNROLLED(int n = 0; n < rows * columns; n++) sums[n] = _mm512_setzero_ps();
  group_place at = first_group(p);
  for (int64_t step = 0; step < p->steps; step++, x += span, at = next_group(p, at)) {
    UNROLLED(int j = 0; j < columns; j++) {
      const uint8_t* own = (const uint8_t*)p->rhs + (column + j) * p->rhs_stride;
      __m512i w[2];
      unsigned_step(four_bits, own, step, bytes, table, w);
      _mm_prefetch((const char*)own + columns * p->rhs_stride + step * LINE, _MM_HINT_T0);
      const __m512 scale = of_lanes(p, scales, j, at.first);
      const __m512 zero = zeros.first == NULL ? _mm512_setzero_ps()
                                        : of_lanes(p, zeros, j, at.first);
      UNROLLED(int i = 0; i < rows; i++) {
        const int64_t lane = lanes + (i * p->steps + step) * 16;
        __m512i integers = _mm512_load_si512(p->lane_offsets + lane);
        UNROLLED(int n = 0; n < lines; n++)
        ADD_PRODUCTS(integers, w[n], _mm512_load_si512(x + i * p->steps * span + n * LINE));
        __m512 part = _mm512_cvtepi32_ps(integers);
        if (zeros.first != NULL) part = _mm512_fnmadd_ps(zero, _mm512_load_ps(p->lane_sums + lane), part);
        if (p->lane_scales != NULL) part = _mm512_mul_ps(part, _mm512_load_ps(p->lane_scales + lane));
        sums[j * rows + i] = _mm512_fmadd_ps(part, scale, sums[j * rows + i]);
      }
    }
  }
  UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++) {
    const float of_row = p->lane_scales == NULL ? p->lhs_scale[row + i] : 1.0f;
    p->y[(row + i) * p->columns + column + j] = _mm512_reduce_add_ps(sums[j * rows + i]) * of_row;
  }
}

#define COLUMNS_OF(name, four_bits, columns)                                                                      \
  static VNNI __attribute__((noinline)) void name(const product* p, int64_t row, int64_t end, int64_t column,     \
                                                  __m512i table, group_numbers scales, group_numbers zeros) {       \
    for (; row + ROWS <= end; row += ROWS) tile(four_bits, ROWS, columns, p, row, column, table, scales, zeros);  \
    for (; row < end; row++) tile(four_bits, 1, columns, p, row, column, table, scales, zeros);                   \
  }
COLUMNS_OF(two_of_four_bits, 1, 2)
COLUMNS_OF(one_of_four_bits, 1, 1)
COLUMNS_OF(two_of_bytes, 0, 2)
COLUMNS_OF(one_of_bytes, 0, 1)

#define ONE_ROW(name, four_bits)                                                                                  \
  static VNNI __attribute__((noinline)) void name(const product* p, int64_t row, int64_t end, int64_t column,     \
                                                  __m512i table, group_numbers scales, group_numbers zeros) {       \
    for (; row < end; row++) tile(four_bits, 1, COLUMNS_OF_ONE, p, row, column, table, scales, zeros);            \
  }
ONE_ROW(four_of_four_bits, 1)
ONE_ROW(four_of_bytes, 0)

VNNI void group_tiles(const product* p, const block* b, uint8_t* scratch) {
  float* of_zeros = (float*)scratch + STRIPE * (p->groups + SPARE);
  const int8_t least = least_of(p);
  int8_t differences[16] = {0};
  if (p->four_bits)
    for (int n = 0; n < 16; n++) differences[n] = (int8_t)(p->table[n] - least);
  const __m512i table = table_of(differences);
  for (int64_t column = b->column; column < b->column_end; column += STRIPE) {
    const int64_t end = at_most(column + STRIPE, b->column_end);
    const group_numbers scales = stripe_of(p, p->scale, column, end - column, (float*)scratch);
    const group_numbers zeros = stripe_of(p, p->zero, column, end - column, of_zeros);
    for (int64_t j = column, width; j < end; j += width) {
      const int single = b->row_end - b->row == 1 && j + COLUMNS_OF_ONE <= end, both = j + COLUMNS <= end;
      const group_numbers own = from_column(scales, j - column), own_zeros = from_column(zeros, j - column);
      width = single ? COLUMNS_OF_ONE : both ? COLUMNS : 1;
      if (p->four_bits)
        (single ? four_of_four_bits : both ? two_of_four_bits : one_of_four_bits)(p, b->row, b->row_end, j, table, own,
                                                                                  own_zeros);
      else
        (single ? four_of_bytes : both ? two_of_bytes : one_of_bytes)(p, b->row, b->row_end, j, table, own, own_zeros);
    }
  }
}

#endif
