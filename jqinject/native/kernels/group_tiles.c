/* int8 times int8 or numbers in 4 bits, in groups along the depth: few rows, and with AVX2 any number of them.
 *
 * A step is a line of rhs. Each lane of its sums belongs to one group (see layout.c); the sums of a step, or of all steps
 * of a group, exact integers, are multiplied by the scales of the lanes' groups and added up in float32. What makes rhs
 * an instruction's unsigned operand (its least number is taken off) is put on again beforehand: the sums begin with
 * `lane_offsets`. Zero points are taken off lane by lane, exact as well.
 *
 * A tile is a few rows or one times a few columns, whose sums stay in registers as far as these go. A stripe of columns
 * stays in the first-level cache while the rows of a block of lhs pass, which stays in the second-level cache.
 */
#include "stripes.h"

#if defined(__x86_64__)

enum { MOST_OF_TILE = 8 };

/* Groups that fill whole steps, and steps of several groups; both with zero points; and any, where lhs has a scale for
 * each group too. */
typedef enum { WHOLE_STEPS, PARTS_OF_STEPS, WHOLE_WITH_ZEROS, PARTS_WITH_ZEROS, ANY } groups_kind;

/* Scales and zero points of the tile's columns, and copies of the block's last lines. */
typedef struct {
  group_numbers scale, zero;
  const uint8_t* copies;
} of_columns;

INLINED void tile(const unsigned_kind kind, const groups_kind groups, const int rows, const int columns,
                  const product* p, const block* b, int64_t row, int64_t column, ivec key, of_columns numbers) {
  const int span = LINES(kind) * LINE;
  const int whole_steps = groups == ANY ? p->groups_a_step == 0 : groups % 2 == WHOLE_STEPS;
  const int zeros = groups == ANY ? numbers.zero.first != NULL : groups >= WHOLE_WITH_ZEROS;
  const int64_t row_lanes = p->steps * LANES, next = whole_steps ? 1 : p->groups_a_step;
  const int64_t steps = whole_steps ? at_most(p->steps_a_group, p->steps) : 1; /* between two scales */
  const ivec places = groups_of_lanes(p);
  const int8_t *x = (const int8_t*)p->laid_out + row * p->laid_out_stride, *x_end = x + p->steps * span;
  run_of_lines rhs = lines_from(p, numbers.copies, b, column, 0);
  const uint8_t *line = rhs.first, *run_end = rhs.first + rhs.end;
  fvec sums[MOST_OF_TILE];
  UNROLLED(int n = 0; n < rows * columns; n++) sums[n] = V(setzero_ps)();
  for (int64_t group = 0, lane = row * row_lanes; x < x_end; group += next, lane += steps * LANES) {
    ivec products[MOST_OF_TILE];
    UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++)
    products[j * rows + i] = load_line(p->lane_offsets + lane + i * row_lanes);
    for (const int8_t* end = x + steps * span; x < end; x += span, line += LINE) {
      if (line == run_end) {
        rhs = lines_from(p, numbers.copies, b, column, rhs.end);
        line = rhs.first + rhs.end - LINE, run_end = line + LINE;
      }
      UNROLLED(int j = 0; j < columns; j++) {
        const uint8_t* own = line + j * rhs.stride;
        ivec w[2];
        unsigned_lines(kind, key, loadu_line(own), w);
        _mm_prefetch((const char*)own + columns * rhs.stride, _MM_HINT_T0);
        UNROLLED(int i = 0; i < rows; i++)
        products[j * rows + i] = with_products(kind, products[j * rows + i], w, x + i * p->laid_out_stride);
      }
    }
    const float* scales = numbers.scale.first + group * numbers.scale.group;
    if (whole_steps) _mm_prefetch((const char*)scales + ALIGNMENT, _MM_HINT_T0);
    UNROLLED(int j = 0; j < columns; j++) {
      const fvec scale = of_lanes(whole_steps, numbers.scale, j, group, places);
      UNROLLED(int i = 0; i < rows; i++) {
        const int64_t own = lane + i * row_lanes;
        fvec part = V(cvtepi32_ps)(products[j * rows + i]);
        if (zeros) {
          const fvec zero = of_lanes(whole_steps, numbers.zero, j, group, places);
          part = V(fnmadd_ps)(zero, V(load_ps)(p->lane_sums + own), part);
        }
        if (groups == ANY && p->lane_scales != NULL) part = V(mul_ps)(part, V(load_ps)(p->lane_scales + own));
        sums[j * rows + i] = V(fmadd_ps)(part, scale, sums[j * rows + i]);
      }
    }
  }
  UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++) {
    const float of_row = p->lane_scales == NULL ? p->lhs_scale[row + i] : 1.0f;
    p->y[(row + i) * p->columns + column + j] = total(sums[j * rows + i]) * of_row;
  }
}

/* Some rows of a stripe of columns, whose scales and zero points these are. */
typedef void tiles(const product* p, const block* b, int64_t row, int64_t column, int64_t end, ivec key, of_columns numbers);

static inline of_columns from(of_columns n, int64_t column) {
  return (of_columns){from_column(n.scale, column), from_column(n.zero, column), n.copies};
}

#define TILES(kind, groups, rows, columns)                                                                           \
  static TARGET __attribute__((noinline)) void kind##_##groups##_##rows(const product* p, const block* b, int64_t row, \
                                                                        int64_t column, int64_t end, ivec key,       \
                                                                        of_columns numbers) {                        \
    int64_t j = column;                                                                                             \
    for (; j + columns <= end; j += columns)                                                                        \
      tile(kind, groups, rows, columns, p, b, row, j, key, from(numbers, j - column));                              \
    for (; j < end; j++) tile(kind, groups, rows, 1, p, b, row, j, key, from(numbers, j - column));                 \
  }
#define HEIGHTS(kind, groups) TILES(kind, groups, 8, 1) TILES(kind, groups, 4, 2) TILES(kind, groups, 1, 4)
#define ALL_TILES(kind)                                                                                    \
  HEIGHTS(kind, WHOLE_STEPS) HEIGHTS(kind, PARTS_OF_STEPS) HEIGHTS(kind, WHOLE_WITH_ZEROS)                 \
  HEIGHTS(kind, PARTS_WITH_ZEROS) HEIGHTS(kind, ANY)
KINDS(ALL_TILES)

#define CHOICE(kind, rows)                                                                  \
  {kind##_WHOLE_STEPS_##rows, kind##_PARTS_OF_STEPS_##rows, kind##_WHOLE_WITH_ZEROS_##rows, \
   kind##_PARTS_WITH_ZEROS_##rows, kind##_ANY_##rows}
#define CHOICES(kind) {CHOICE(kind, 8), CHOICE(kind, 4), CHOICE(kind, 1)},

TARGET void NAMED(group_tiles)(const product* p, const block* b, uint8_t* scratch) {
  static const int heights[] = {8, 4, 1};
  static tiles* const choices[][3][5] = {KINDS(CHOICES)};
  const unsigned_form form = unsigned_form_of(p);
  const int in_parts = p->groups_a_step > 0, zeros = p->zero.data != NULL;
  const groups_kind groups = p->lane_scales != NULL ? ANY : (groups_kind)(in_parts + 2 * zeros);
  float* of_zeros = (float*)scratch + STRIPE * stripe_stride(p);
  uint8_t* copies = (uint8_t*)(of_zeros + STRIPE * stripe_stride(p));
  struct {
    int height;
    unsigned_kind kind;
  } rows[BLOCK_ROWS]; /* of a tile, at its first row */
  copy_last_lines(p, b, copies);
  for (int64_t i = b->row; i < b->row_end;) {
    int height = 0;
    while (heights[height] > b->row_end - i) height++;
    rows[i - b->row].height = height;
    rows[i - b->row].kind = kind_for(form.kind, p->lhs + i * p->depth, heights[height] * p->depth);
    i += heights[height];
  }
  for (int64_t stripe = b->column; stripe < b->column_end; stripe += STRIPE) {
    const int64_t end = at_most(stripe + STRIPE, b->column_end), columns = end - stripe;
    const of_columns own = {stripe_of(p, p->scale, stripe, columns, (float*)scratch),
                            stripe_of(p, p->zero, stripe, columns, of_zeros), copies};
    for (int64_t i = b->row; i < b->row_end; i += heights[rows[i - b->row].height])
      choices[rows[i - b->row].kind][rows[i - b->row].height][groups](p, b, i, stripe, end, form.key, own);
  }
}

#endif
