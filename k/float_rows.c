/* Floats times stored numbers (int8, or in 4 bits): at most FEW_FLOAT_ROWS rows.
 *
 * rhs is read once, as it lies, and becomes floats in registers. Of 4 bits, a line is LANES words of 8 indices: shifted
 * right by 4 n, the lowest bits of each word are its n-th index, by which a permutation takes numbers of the table.
 * lhs is laid out in that order (see layout.c) and stays in the first-level cache.
 *
 * A tile is all rows times one or two columns, whose sums stay in registers. The sums of a step are multiplied by
 * the scales of the lanes' groups and added to those of the whole depth. Of int8 in groups below a line, where the lanes of
 * one sum have several groups, the numbers themselves are scaled.
 */
#include "stripes.h"

#if defined(__x86_64__)

enum { MOST_COLUMNS = 2 };
/* In 4 bits where groups fill whole steps, and where steps have several; int8, and that in smaller groups. */
typedef enum { FOUR_BITS, FOUR_BITS_IN_PARTS, INT8, SCALED_INT8 } kind;

/* The numbers of a step, vector by vector. */
INLINED void numbers_of(const kind kind, ivec packed, const uint8_t* line, int64_t left, float_table table, fvec* found) {
  if (kind <= FOUR_BITS_IN_PARTS) {
    looked_up(table, packed, found);
  } else {
    UNROLLED(int n = 0; n < 4; n++) found[n] = bytes_as_floats(packed, line, left, n);
  }
}

INLINED void tile(const kind kind, const int rows, const int columns, const product* p, int64_t column,
                  const float_table* of_four_bits, group_numbers scales, group_numbers zeros) {
  const int four_bits = kind <= FOUR_BITS_IN_PARTS, whole_steps = kind != FOUR_BITS_IN_PARTS;
  const int vectors = four_bits ? 8 : 4, span = LANES * vectors;
  const int64_t bytes = four_bits ? (p->depth + 1) / 2 : p->depth, row_size = p->steps * span;
  const float_table table = *of_four_bits;
  const float* x = p->laid_out;
  const ivec places = groups_of_lanes(p);
  fvec sums[MOST_COLUMNS][FEW_FLOAT_ROWS];
  UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++) sums[j][i] = V(setzero_ps)();
  group_place at = first_group(p);
  for (int64_t step = 0; step < p->steps; step++, x += span, at = next_group(p, at)) {
    fvec w[MOST_COLUMNS][8], part[MOST_COLUMNS][FEW_FLOAT_ROWS];
    UNROLLED(int j = 0; j < columns; j++) {
      const uint8_t* row = (const uint8_t*)p->rhs + (column + j) * p->rhs_stride;
      const uint8_t* line = row + step * LINE;
      _mm_prefetch((const char*)line + columns * p->rhs_stride, _MM_HINT_T0);
      const ivec packed = four_bits || BYTES_FROM_LINE ? packed_line(row, step * LINE, bytes) : no_integers();
      numbers_of(kind, packed, line, bytes - step * LINE, table, w[j]);
      UNROLLED(int i = 0; i < rows; i++) part[j][i] = V(setzero_ps)();
    }
    UNROLLED(int n = 0; n < vectors; n++) UNROLLED(int j = 0; j < columns; j++) {
      if (kind == SCALED_INT8) {
        const int64_t place = j * scales.column + group_of_vector(p, at.first, n) * scales.group;
        if (zeros.first != NULL) w[j][n] = V(sub_ps)(w[j][n], V(set1_ps)(zeros.first[place]));
        w[j][n] = V(mul_ps)(w[j][n], V(set1_ps)(scales.first[place]));
      }
      UNROLLED(int i = 0; i < rows; i++)
      part[j][i] = V(fmadd_ps)(w[j][n], V(load_ps)(x + i * row_size + LANES * n), part[j][i]);
    }
    UNROLLED(int j = 0; j < columns; j++) {
      if (kind == SCALED_INT8) {
        UNROLLED(int i = 0; i < rows; i++) sums[j][i] = V(add_ps)(sums[j][i], part[j][i]);
        continue;
      }
      const fvec scale = of_lanes(whole_steps, scales, j, at.first, places);
      if (zeros.first != NULL) {
        const fvec zero = of_lanes(whole_steps, zeros, j, at.first, places);
        UNROLLED(int i = 0; i < rows; i++)
        part[j][i] =
            V(fnmadd_ps)(zero, V(load_ps)(p->lane_sums + (i * p->steps + step) * LANES), part[j][i]);
      }
      UNROLLED(int i = 0; i < rows; i++) sums[j][i] = V(fmadd_ps)(part[j][i], scale, sums[j][i]);
    }
  }
  UNROLLED(int j = 0; j < columns; j++)
  UNROLLED(int i = 0; i < rows; i++) p->y[i * p->columns + column + j] = total(sums[j][i]);
}

typedef void rows_of_columns(const product* p, int64_t column, int64_t end, const float_table* table,
                             group_numbers scales, group_numbers zeros);

#define ROWS_OF(kind, rows)                                                                                          \
  static TARGET __attribute__((noinline)) void kind##_##rows(const product* p, int64_t column, int64_t end,         \
                                                             const float_table* table, group_numbers scales,        \
                                                             group_numbers zeros) {                                 \
    for (int64_t j = column; j < end; j += FLOAT_COLUMNS(rows)) {                                                   \
      const group_numbers own = from_column(scales, j - column), own_zeros = from_column(zeros, j - column);        \
      if (j + FLOAT_COLUMNS(rows) <= end)                                                                           \
        tile(kind, rows, FLOAT_COLUMNS(rows), p, j, table, own, own_zeros);                                         \
      else                                                                                                          \
        tile(kind, rows, 1, p, j, table, own, own_zeros);                                                           \
    }                                                                                                               \
  }
#define ROWS(kind) ROWS_OF(kind, 1) ROWS_OF(kind, 2) ROWS_OF(kind, 3) ROWS_OF(kind, 4)
ROWS(FOUR_BITS)
ROWS(FOUR_BITS_IN_PARTS)
ROWS(INT8)
ROWS(SCALED_INT8)

#define CHOICE(kind) {kind##_1, kind##_2, kind##_3, kind##_4}

/* A block has all rows. */
TARGET void NAMED(float_rows)(const product* p, const block* b, uint8_t* scratch) {
  static rows_of_columns* const choices[4][FEW_FLOAT_ROWS] = {CHOICE(FOUR_BITS), CHOICE(FOUR_BITS_IN_PARTS), CHOICE(INT8),
                                                              CHOICE(SCALED_INT8)};
  const kind kind = !p->four_bits          ? p->groups_a_step == 0 ? INT8 : SCALED_INT8
                    : p->groups_a_step == 0 ? FOUR_BITS
                                            : FOUR_BITS_IN_PARTS;
  const float_table table = float_table_of(p->values);
  float* of_zeros = (float*)scratch + STRIPE * stripe_stride(p);
  for (int64_t j = b->column; j < b->column_end; j += STRIPE) {
    const int64_t end = at_most(j + STRIPE, b->column_end);
    const group_numbers scales = stripe_of(p, p->scale, j, end - j, (float*)scratch);
    const group_numbers zeros = stripe_of(p, p->zero, j, end - j, of_zeros);
    choices[kind][b->row_end - b->row - 1](p, j, end, &table, scales, zeros);
  }
}

#endif
