/* Elementwise operations on the numbers around a product; see steps.c. */
#ifndef JQINJECT_STEPS_H
#define JQINJECT_STEPS_H

#include "product.h"
#include "xla_ffi.h"

enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM, ROUND, TO_BFLOAT16, SUBTRACT_INTEGER, MULTIPLY_BY_PRODUCT };
enum { MULTIPLY_BY_RECIPROCAL = MULTIPLY_BY_PRODUCT + 1, REPLACE_EQUAL, REPLACE_BELOW, KINDS };
enum { MOST_STEPS = 32 };

/* A matrix beside the numbers; an axis of size 1 is broadcast: its stride is 0. */
typedef struct {
  const ffi_buffer* given;
  int64_t of_row, of_column;
} step_operand;

/* x = x `kind` operands[0]. MULTIPLY_BY_PRODUCT is x * (operands[0] * operands[1]), REPLACE_EQUAL
 * x == operands[0] ? operands[1] : x. */
typedef struct {
  int kind, count;
  step_operand operands[2];
} step;

typedef struct {
  step first[MOST_STEPS];
  int count;
} steps;

/* Reads the steps of codes first[0 ... count - 1] on `rows` x `columns` numbers; their operands are taken one after the
 * other from *next on. 0 if they are not what the codes take. */
HIDDEN int read_steps(steps* s, const int32_t* codes, int64_t count, int64_t rows, int64_t columns,
                      ffi_buffer* const** next, ffi_buffer* const* end);

/* Elements of a matrix, and its row stride in numbers. */
typedef struct {
  void* data;
  int dtype; /* of ffi_buffer: FFI_S32 (only to read), FFI_F32, FFI_BF16 or FFI_S8 */
  int64_t stride;
} matrix;

/* Numbers of a block from one matrix, changed by the steps, to another, which may be the same memory. */
HIDDEN void apply_steps(const steps* s, const matrix* from, const matrix* to, const block* b);

#endif
