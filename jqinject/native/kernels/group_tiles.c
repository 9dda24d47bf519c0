/* int8 times int8 or numbers in 4 bits, in groups along the depth.
 *
 * A step is a line of rhs. Each lane of its sums belongs to one group (see layout.c); the sums of a step, exact
 * integers, are multiplied by the scales of the lanes' groups and added up in float32. What makes rhs an instruction's
 * unsigned operand (its least number is taken off) is put on again beforehand: the sums begin with `lane_offsets`.
 * Zero points are taken off lane by lane, exact as well.
 *
 * A tile is a few rows or one times a few columns, whose sums stay in registers over the whole depth. A stripe of columns
 * stays in the first-level cache while the rows of a block of lhs pass, which stays in the second-level cache.
 */
#include "stripes.h"

#if defined(__x86_64__)

enum { COLUMNS_OF_ONE_ROW = 4 };

/* Groups that fill whole steps, and steps of several groups; both with zero points; and any, where lhs has a scale for
 * each group too. */
typedef enum { WHOLE_STEPS, PARTS_OF_STEPS, WHOLE_WITH_ZEROS, PARTS_WITH_ZEROS, ANY } groups_kind;

/* Scales and zero points of the tile's columns. */
typedef struct {
  group_numbers scale, zero;
} of_columns;

INLINED void tile(const unsigned_kind kind, const groups_kind groups, const int rows, const int columns,
                  const product* p, int64_t row, int64_t column, ivec key, of_columns numbers) {
  const int span = LINES(kind) * LINE;
  const int whole_steps = groups == ANY ? p->groups_a_step == 0 : groups % 2 == WHOLE_STEPS;
  const int zeros = groups == ANY ? numbers.zero.first != NULL : groups >= WHOLE_WITH_ZEROS;
  const int64_t bytes = kind == BYTES ? p->depth : (p->depth + 1) / 2, lanes = row * p->steps * LANES;
  const int8_t* x = (const int8_t*)p->laid_out + row * p->laid_out_stride;
  const ivec places = groups_of_lanes(p);
  fvec sums[GROUP_COLUMNS * GROUP_ROWS];
  UNROLLED(int n = 0; n < rows * columns; n++) sums[n] = V(setzero_ps)();
  group_place at = first_group(p);
  for (int64_t step = 0; step < p->steps; step++, x += span, at = next_group(p, at)) {
    UNROLLED(int j = 0; j < columns; j++) {
      const uint8_t* own = (const uint8_t*)p->rhs + (column + j) * p->rhs_stride;
      ivec w[2];
      unsigned_lines(kind, key, packed_line(own, step * LINE, bytes), w);
      _mm_prefetch((const char*)own + columns * p->rhs_stride + step * LINE, _MM_HINT_T0);
      const fvec scale = of_lanes(whole_steps, numbers.scale, j, at.first, places);
      UNROLLED(int i = 0; i < rows; i++) {
        const int64_t lane = lanes + (i * p->steps + step) * LANES;
        const ivec offsets = load_line(p->lane_offsets + lane);
        fvec part = V(cvtepi32_ps)(with_products(kind, offsets, w, x + i * p->laid_out_stride));
        if (zeros) {
          const fvec zero = of_lanes(whole_steps, numbers.zero, j, at.first, places);
          part = V(fnmadd_ps)(zero, V(load_ps)(p->lane_sums + lane), part);
        }
        if (groups == ANY && p->lane_scales != NULL) part = V(mul_ps)(part, V(load_ps)(p->lane_scales + lane));
        sums[j * rows + i] = V(fmadd_ps)(part, scale, sums[j * rows + i]);
      }
    }
  }
  UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++) {
    const float of_row = p->lane_scales == NULL ? p->lhs_scale[row + i] : 1.0f;
    p->y[(row + i) * p->columns + column + j] = total(sums[j * rows + i]) * of_row;
  }
}

/* A stripe of columns, whose scales and zero points these are, of all rows of a block. */
typedef void tiles(const product* p, const block* b, int64_t column, int64_t end, ivec key, of_columns numbers);

static inline of_columns from(of_columns n, int64_t column) {
  return (of_columns){from_column(n.scale, column), from_column(n.zero, column)};
}

#define ROWS_OF(rows, columns, kind, groups)                                                                         \
  for (; i + rows <= b->row_end; i += rows) {                                                                        \
    int64_t j = column;                                                                                              \
    for (; j + columns <= end; j += columns) tile(kind, groups, rows, columns, p, i, j, key, from(numbers, j - column)); \
    for (; j < end; j++) tile(kind, groups, rows, 1, p, i, j, key, from(numbers, j - column));                       \
  }
#define TILES(kind, groups)                                                                                         \
  static TARGET __attribute__((noinline)) void kind##_##groups(const product* p, const block* b, int64_t column,      \
                                                             int64_t end, ivec key, of_columns numbers) {        \
    int64_t i = b->row;                                                                                             \
    ROWS_OF(GROUP_ROWS, GROUP_COLUMNS, kind, groups)                                                                \
    ROWS_OF(1, COLUMNS_OF_ONE_ROW, kind, groups)                                                                    \
  }
#define ALL_TILES(kind)                                                                                             \
  TILES(kind, WHOLE_STEPS) TILES(kind, PARTS_OF_STEPS) TILES(kind, WHOLE_WITH_ZEROS) TILES(kind, PARTS_WITH_ZEROS)  \
  TILES(kind, ANY)
KINDS(ALL_TILES)

#define CHOICES(kind) \
  {kind##_WHOLE_STEPS, kind##_PARTS_OF_STEPS, kind##_WHOLE_WITH_ZEROS, kind##_PARTS_WITH_ZEROS, kind##_ANY},

TARGET void NAMED(group_tiles)(const product* p, const block* b, uint8_t* scratch) {
  static tiles* const choices[3][5] = {KINDS(CHOICES)};
  const unsigned_form form = unsigned_form_of(p);
  const int in_parts = p->groups_a_step > 0, zeros = p->zero.data != NULL;
  const groups_kind groups = p->lane_scales != NULL ? ANY : (groups_kind)(in_parts + 2 * zeros);
  float* of_zeros = (float*)scratch + STRIPE * stripe_stride(p);
  for (int64_t stripe = b->column; stripe < b->column_end; stripe += STRIPE) {
    const int64_t end = at_most(stripe + STRIPE, b->column_end), columns = end - stripe;
    const of_columns own = {stripe_of(p, p->scale, stripe, columns, (float*)scratch),
                            stripe_of(p, p->zero, stripe, columns, of_zeros)};
    choices[form.kind][groups](p, b, stripe, end, form.key, own);
  }
}

#endif
