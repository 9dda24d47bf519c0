/* What the kernels share: one product of two matrices, and how its blocks are computed. */
#ifndef JQINJECT_PRODUCT_H
#define JQINJECT_PRODUCT_H

#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

/* y[i][j] = sum over t of lhs[i][t] * rhs[j][t]: both operands have the summed axis last. */
typedef struct {
  int64_t rows, columns, depth;
  const int8_t *lhs, *rhs;
  int32_t* out;
} product;

/* Results [row, row_end) x [column, column_end). */
typedef struct {
  int64_t row, row_end, column, column_end;
} block;

enum { LINE = 64 };                                               /* bytes; what one instruction takes */
enum { TILE_ROWS = 3, TILE_COLUMNS = 8, DEPTH = 2048 };           /* see int8_tiles.c */
enum { BLOCK_ROWS = 192, BLOCK_COLUMNS = 256, FEW_ROWS = 16 };    /* the largest blocks; see int8_rows.c */
enum { SCRATCH = (BLOCK_ROWS + TILE_COLUMNS) * DEPTH };           /* bytes, of each thread */

typedef void kernel(const product* p, const block* b, uint8_t* scratch);
HIDDEN kernel int8_tiles, int8_rows;

static inline int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }
static inline int64_t at_least(int64_t x, int64_t limit) { return x > limit ? x : limit; }
static inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

#endif
