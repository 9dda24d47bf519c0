/* Floats times stored numbers (int8, or in 4 bits): many rows.
 *
 * A lane is a column. A tile is up to 12 rows times two vectors of columns, whose sums stay in registers over
 * FLOAT_DEPTH: each number of lhs is broadcast and multiplied by both vectors. Before it, two stripes of columns become
 * floats, scales and zero points included, and stay in the first-level cache while all rows of a block of lhs pass, which
 * is laid out tile by tile, the rows of a tile side by side (see lay_out_tiles), and stays in the second-level cache.
 *
 * To unpack, a square of words, a line of every column, is turned at once: a vector then has the same word of all columns,
 * 8 numbers in 4 bits or 4 bytes.
 */
#include <string.h>

#include "stripes.h"

#if defined(__x86_64__)

enum { PANEL = 2 * STRIPE };

INLINED void tile(const int rows, const float* lhs, const float* rhs, int64_t depth, int64_t next, const float* before,
                  float* y, int64_t stride) {
  fvec sums[MOST_TILE_ROWS][2];
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < 2; j++) sums[i][j] = V(setzero_ps)();
  if (before != NULL)
    UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < PANEL * 4; j += ALIGNMENT)
    _mm_prefetch((const char*)(before + i * PANEL) + j, _MM_HINT_T0);
  DEPTH_LOOP (; depth > 0; depth--, lhs += rows, rhs += PANEL) {
    const fvec first = V(load_ps)(rhs), second = V(load_ps)(rhs + LANES);
    _mm_prefetch((const char*)(lhs + next), _MM_HINT_T0);
    UNROLLED(int i = 0; i < rows; i++) {
      const fvec x = V(set1_ps)(lhs[i]);
      sums[i][0] = V(fmadd_ps)(x, first, sums[i][0]);
      sums[i][1] = V(fmadd_ps)(x, second, sums[i][1]);
    }
  }
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < 2; j++) {
    if (before != NULL) sums[i][j] = V(add_ps)(sums[i][j], V(load_ps)(before + i * PANEL + j * LANES));
    V(storeu_ps)(y + i * stride + j * LANES, sums[i][j]);
  }
}

/* A tile of which only `rows` rows and `columns` columns exist: what is beyond is cut off. */
#define TILE(height)                                                                                                 \
  static TARGET __attribute__((noinline)) void tile_##height(const float* lhs, const float* rhs, int64_t depth,      \
                                                             int64_t next, const float* before, float* y,            \
                                                             int64_t stride, int64_t rows, int64_t columns) {        \
    if (rows == height && columns == PANEL) {                                                                        \
      tile(height, lhs, rhs, depth, next, before, y, stride);                                                         \
      return;                                                                                                        \
    }                                                                                                                \
    float all[height * PANEL];                                                                                       \
    tile(height, lhs, rhs, depth, next, before, all, PANEL);                                                          \
    for (int64_t i = 0; i < rows; i++) memcpy(y + i * stride, all + i * PANEL, columns * sizeof(float));             \
  }
FLOAT_TILES(TILE)

typedef void any_tile(const float*, const float*, int64_t, int64_t, const float*, float*, int64_t, int64_t, int64_t);

static any_tile* tile_of(int64_t height) {
#define IF_HEIGHT(of_tile) \
  if (height == of_tile) return tile_##of_tile;
  FLOAT_TILES(IF_HEIGHT)
  return NULL;
}

/* A word of each column as floats: 8 vectors or 4. */
INLINED void unpack_word(const int four_bits, const int has_zeros, ivec word, float_table table, fvec scale, fvec zero,
                         float* to) {
  const int count = four_bits ? 8 : 4;
  fvec w[8];
  if (four_bits) looked_up(table, word, w);
  UNROLLED(int n = 0; n < count; n++) {
    if (!four_bits) w[n] = V(cvtepi32_ps)(V(srai_epi32)(n < 3 ? V(slli_epi32)(word, 24 - 8 * n) : word, 24));
    if (has_zeros) w[n] = V(sub_ps)(w[n], zero);
    V(store_ps)(to + n * PANEL, V(mul_ps)(w[n], scale));
  }
}

/* Steps [step, end) of a stripe whose scales and zero points these are. */
INLINED void unpack_stripe(const int four_bits, const int has_zeros, const float_table* of_four_bits, const product* p,
                           stripe s, int64_t step, int64_t end, group_numbers scales, group_numbers zeros, float* to) {
  const int count = four_bits ? 8 : 4;
  const int64_t bytes = row_bytes(p), ahead = STRIPE * p->rhs_stride;
  const float_table table = *of_four_bits;
  const uint8_t* rows[LANES];
  for (int j = 0; j < LANES; j++)
    rows[j] = (const uint8_t*)p->rhs + (s.column + at_most(j, s.columns - 1)) * p->rhs_stride;
  int64_t groups = s.groups, left = (s.group + 1) * p->group - step * LANES * count;
  fvec scale = V(loadu_ps)(scales.first), zero = has_zeros ? V(loadu_ps)(zeros.first) : V(setzero_ps)();
  for (; step < end; step++) {
    fvec words[LANES];
    UNROLLED(int j = 0; j < LANES; j++) {
      words[j] = as_floats(packed_line(rows[j], step * LINE, bytes));
      if (step * LINE % ALIGNMENT == 0) _mm_prefetch((const char*)rows[j] + ahead + step * LINE, _MM_HINT_T1);
    }
    turn(words);
    for (int n = 0; n < LANES; n++, to += count * PANEL) {
      unpack_word(four_bits, has_zeros, as_integers(words[n]), table, scale, zero, to);
      if ((left -= count) > 0) continue;
      left = p->group;
      if (--groups < 1) continue; /* the last step may go on behind the groups */
      scale = V(loadu_ps)(scales.first += scales.group);
      if (has_zeros) zero = V(loadu_ps)(zeros.first += zeros.group);
    }
  }
}

static TARGET void unpack(const product* p, const float_table* table, int64_t column, int64_t columns, int64_t step,
                          int64_t end, float* of_groups, float* to) {
  const int64_t size = p->four_bits ? 2 * LINE : LINE, first = step * size / p->group;
  const int64_t last = at_most((end * size - 1) / p->group, p->groups - 1);
  const stripe s = {column, columns, first, last + 1 - first};
  const group_numbers scales = read_stripe(p, p->scale, GROUP_BY_GROUP, s, of_groups);
  const group_numbers zeros = read_stripe(p, p->zero, GROUP_BY_GROUP, s, of_groups + STRIPE * stripe_stride(p));
  switch (2 * p->four_bits + (zeros.first != NULL)) {
    case 3:
      unpack_stripe(1, 1, table, p, s, step, end, scales, zeros, to);
      break;
    case 2:
      unpack_stripe(1, 0, table, p, s, step, end, scales, zeros, to);
      break;
    case 1:
      unpack_stripe(0, 1, table, p, s, step, end, scales, zeros, to);
      break;
    default:
      unpack_stripe(0, 0, table, p, s, step, end, scales, zeros, to);
  }
}

TARGET void NAMED(float_tiles)(const product* p, const block* b, uint8_t* scratch) {
  const float_table table = float_table_of(p->values);
  float *unpacked = (float*)scratch, *of_groups = unpacked + PANEL * FLOAT_DEPTH;
  float* of_block = (float*)(scratch + OF_NUMBERS + OF_SCALES);
  const int64_t of_column = parts(b->row_end - b->row, MOST_TILE_ROWS) * MOST_TILE_ROWS;
  const int64_t size = p->four_bits ? 2 * LINE : LINE, at_once = FLOAT_DEPTH / size, depth = p->steps * size;
  for (int64_t step = 0; step < p->steps; step += at_once) {
    const int64_t end = at_most(step + at_once, p->steps);
    for (int64_t j = b->column; j < b->column_end; j += PANEL) {
      const int64_t columns = at_most(b->column_end - j, PANEL), first = at_most(columns, STRIPE);
      unpack(p, &table, j, first, step, end, of_groups, unpacked);
      if (columns > STRIPE) unpack(p, &table, j + STRIPE, columns - STRIPE, step, end, of_groups, unpacked + STRIPE);
      for (int64_t i = b->row, rows; i < b->row_end; i += rows) {
        const int64_t height = tile_height(p->rows - i);
        const float* lhs = (const float*)p->laid_out + i * depth + step * size * height;
        rows = at_most(height, b->row_end - i);
        float *sums = of_block + (j - b->column) * of_column + (i - b->row) * PANEL, *y = p->y + i * p->columns + j;
        const float* before = step > 0 ? sums : NULL;
        const int64_t width = (end - step) * size, next = height * depth; /* from this tile of lhs to the next one */
        if (end == p->steps) tile_of(height)(lhs, unpacked, width, next, before, y, p->columns, rows, columns);
        else tile_of(height)(lhs, unpacked, width, next, before, sums, PANEL, height, PANEL);
      }
    }
  }
}

#endif
