/* What the kernels share: one product of two matrices, and how its blocks are computed. */
#ifndef JQINJECT_PRODUCT_H
#define JQINJECT_PRODUCT_H

#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

enum { ALIGNMENT = 64 }; /* bytes; of memory that kernels read in whole vectors */

/* Numbers as they are given: float32, or a byte each. */
typedef struct {
  const void* data; /* NULL for none */
  int dtype;        /* of ffi_buffer: FFI_F32, FFI_S8, FFI_U8, FFI_F8E4M3FN or FFI_F8E8M0FNU */
} given_numbers;

/* y[i][j] = sum over t of lhs[i][t] * rhs[j][t]: both operands have the summed axis last.
 *
 * rhs is int8, or in 4 bits: two numbers a byte, the lower half first, each an index into a table of 16. In groups along
 * the depth, each group g of a column j has a scale and perhaps a zero point:
 *
 *   y[i][j] = sum over g of scale[g][j] * sum over t in g of lhs[i][t] * (rhs[j][t] - zero[g][j])
 */
typedef struct {
  int64_t rows, columns, depth;
  const int8_t *lhs, *rhs;
  const float* floats; /* lhs, where it is floats */
  int64_t rhs_stride; /* bytes from row to row */
  int four_bits;
  const int8_t* table; /* of 16, of integers in 4 bits */
  const float* values; /* of 16, of floats in 4 bits */
  /* Rows of lhs are laid out anew for each call, but for int8 beside int8 with AVX-512; see layout.c. */
  const void* laid_out;
  const float *lane_sums, *lane_scales;
  const int32_t* lane_offsets;
  int64_t steps;           /* of laid_out in a row, see there */
  int64_t piece, pieces, pieces_a_group; /* of tiles of bytes: groups, or PIECE numbers of one; numbers in one */
  int64_t laid_out_stride; /* bytes from row to row of it */
  /* Groups. */
  int64_t group, groups;
  uint32_t steps_a_group, groups_a_step, lanes_shift; /* of groups that fill steps, or steps groups; see of_lanes */
  given_numbers scale, zero;
  int64_t of_group, of_column; /* strides of scale and zero */
  const float* lhs_scale;
  int64_t lhs_groups;                    /* scales in a row of lhs: 1 or groups */
  union {
    int32_t* out;
    float* y;
  };
} product;

/* Results [row, row_end) x [column, column_end). */
typedef struct {
  int64_t row, row_end, column, column_end;
} block;

enum { TILE_ROWS = 3, TILE_COLUMNS = 8, DEPTH = 2048 };       /* see int8_tiles.c */
enum { MOST_BYTE_TILE_ROWS = 6, PIECE = 1024 };               /* see group_panels.c */
enum { MOST_TILE_ROWS = 12 };                                 /* see float_tiles.c; tiles of bytes divide it */
enum { BLOCK_ROWS = 192, BLOCK_COLUMNS = 256, MOST_FLOAT_ROWS = 516 }; /* the largest blocks, in whole tiles */
_Static_assert(BLOCK_ROWS % MOST_TILE_ROWS == 0 && MOST_FLOAT_ROWS % MOST_TILE_ROWS == 0, "blocks are whole tiles");
enum { FEW_ROWS = 16, FEW_GROUP_ROWS = 4, FEW_FLOAT_ROWS = 4 };
enum { MOST_GROUPS = 1024, SPARE = 16, WIDEST_STRIPE = 16, WIDEST_PANEL = 2 * WIDEST_STRIPE }; /* see stripes.c */
enum { OF_SCALES = 2 * WIDEST_STRIPE * (MOST_GROUPS + SPARE) * sizeof(float) };
enum { OF_NUMBERS = (BLOCK_ROWS + TILE_COLUMNS) * DEPTH };   /* what is packed for tiles, or last lines of a block */
enum { OF_SUMS = MOST_FLOAT_ROWS * BLOCK_COLUMNS * sizeof(float) }; /* of the tiles of a block */
enum { SCRATCH = OF_NUMBERS + OF_SCALES + OF_SUMS };         /* bytes, of each thread */

typedef void kernel(const product* p, const block* b, uint8_t* scratch);
HIDDEN kernel int8_tiles, int8_rows, group_panels;
HIDDEN kernel integer_rows_avx512, group_tiles_avx512, float_rows_avx512, float_tiles_avx512;
HIDDEN kernel integer_rows_avx2, group_tiles_avx2, float_rows_avx2, float_tiles_avx2;

static inline int8_t least_of_table(const int8_t* table) {
  int8_t least = table[0];
  for (int n = 1; n < 16; n++) least = table[n] < least ? table[n] : least;
  return least;
}

static inline int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }
static inline int64_t at_least(int64_t x, int64_t limit) { return x > limit ? x : limit; }
static inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

#endif
