/* The operands of one call; see operands.c. */
#ifndef JQINJECT_OPERANDS_H
#define JQINJECT_OPERANDS_H

#include "processor.h"
#include "product.h"
#include "steps.h"
#include "xla_ffi.h"

enum { INT8_MATMUL, INT4_MATMUL, GROUP_MATMUL, FLOAT_MATMUL };
/* The places of operands. */
enum { LHS, RHS, TABLE, SCALE, ZERO, FORM, LHS_SCALE };

/* A product of bytes with steps: the prologue makes lhs of the input, the epilogue makes the result of the sums. */
typedef struct {
  steps prologue, epilogue;
  const ffi_buffer *input, *result, *operands[2];
  ffi_buffer lhs, sums; /* in memory of the call */
} fused_call;

/* All products of one call. `laid_out` and what follows are of all matrices of lhs, one after the other. */
typedef struct {
  int function;
  const kernel_set* with;
  const ffi_buffer *const *operands, *out;
  fused_call* fused; /* NULL for a product alone */
  kernel* kernel;
  product whole; /* what all products have in common */
  int64_t products, row_blocks, column_blocks, block_columns, block_rows;
  char* memory;
  char* laid_out;
  float *lane_sums, *lane_scales;
  int32_t* lane_offsets;
} work;

/* Reads the operands of a call; 0 if they are not what the function takes. */
HIDDEN int read_operands(work* w, const ffi_buffer* const* operands, int64_t count, const ffi_buffer* out,
                         int function);

/* One of the products. */
HIDDEN product product_of(const work* w, int64_t number);

/* How many matrices an operand has. */
HIDDEN int64_t matrices_of(const ffi_buffer* operand);

/* Whether rhs has zero points; whether there are many rows; whether lhs is laid out as tiles of floats, or of bytes. */
HIDDEN int has_zero(const work* w);
HIDDEN int has_many_rows(const work* w);
HIDDEN int has_float_tiles(const work* w);
HIDDEN int has_byte_tiles(const work* w);

/* The numbers of rhs in a line, and the lanes of their sums. */
HIDDEN int64_t step_of(const work* w);
HIDDEN int64_t lanes_of(const work* w);

/* How many sums are laid out beside a row of lhs: of lanes, or of pieces of the depth. */
HIDDEN int64_t sums_in_row(const work* w);

/* Rows of each matrix of lhs that is laid out (tiles of floats are whole), and their bytes. */
HIDDEN int64_t laid_out_rows(const work* w);
HIDDEN int64_t laid_out_size(const work* w);

#endif
