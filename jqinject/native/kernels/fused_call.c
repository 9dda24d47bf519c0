/* A layer in one call: the prologue rounds its input to bytes, these are multiplied, and the epilogue makes of the sums
 * its output, or the next layer's bytes.
 *
 * Without this XLA runs a loop between two products, which reads sums from memory and writes bytes to it, and starts
 * threads anew. Here each block is finished while its sums are in a cache.
 */
#include "fused_call.h"

#include <stdlib.h>

#include "threads.h"

enum { ROWS = 8 }; /* of lhs, made at once */

/* The operands: the input, rhs, codes (the number of steps before the product, then the steps), operands of steps. */
int read_fused_call(work* w, fused_call* fused, const ffi_call_frame* call) {
  if (call->args.size < 3 || call->results.size != 1) return 0;
  ffi_buffer* const* all = call->args.buffers;
  const ffi_buffer *input = all[0], *rhs = all[1], *codes = all[2], *result = call->results.buffers[0];
  *fused = (fused_call){.input = input, .result = result, .operands = {&fused->lhs, rhs}};
  if (input->rank != 2 || result->rank != 2 || codes->rank != 1 || codes->dtype != FFI_S32 || codes->dims[0] < 1)
    return 0;
  if (input->dtype != FFI_F32 && input->dtype != FFI_BF16 && input->dtype != FFI_S8) return 0;
  if (result->dtype != FFI_F32 && result->dtype != FFI_BF16 && result->dtype != FFI_S8) return 0;
  const int32_t* code = codes->data;
  const int64_t before = *code++, after = codes->dims[0] - 1 - before;
  if (before < 0 || after < 0) return 0;
  ffi_buffer *const* next = all + 3, *const* end = all + call->args.size;
  if (!read_steps(&fused->prologue, code, before, input->dims[0], input->dims[1], &next, end)) return 0;
  if (input->dtype == FFI_S8 && before != 0) return 0;
  if (before > 0 && *code == SUBTRACT_INTEGER) return 0;
  if (!read_steps(&fused->epilogue, code + before, after, result->dims[0], result->dims[1], &next, end)) return 0;
  fused->lhs = *input, fused->sums = *result;
  fused->lhs.dtype = FFI_S8, fused->sums.dtype = FFI_S32;
  if (next != end || !read_operands(w, fused->operands, 2, &fused->sums, INT8_MATMUL)) return 0;
  w->fused = fused;
  return 1;
}

static void make_rows(void* data, int64_t number, uint8_t* scratch) {
  (void)scratch;
  const fused_call* fused = ((const work*)data)->fused;
  const int64_t rows = fused->input->dims[0], depth = fused->input->dims[1];
  const matrix from = {fused->input->data, fused->input->dtype, depth}, to = {fused->lhs.data, FFI_S8, depth};
  const block b = {number * ROWS, at_most((number + 1) * ROWS, rows), 0, depth};
  apply_steps(&fused->prologue, &from, &to, &b);
}

static void* memory_for(const ffi_buffer* x, int64_t bytes) {
  return aligned_alloc(ALIGNMENT, (size_t)(parts(x->dims[0] * x->dims[1] * bytes, ALIGNMENT) * ALIGNMENT));
}

int run_prologue(work* w, int64_t threads) {
  fused_call* fused = w->fused;
  if (fused->result->dtype != FFI_F32) { /* sums take the place of their results otherwise */
    fused->sums.data = memory_for(&fused->sums, sizeof(int32_t));
    if (fused->sums.data == NULL) return 0;
  }
  if (fused->input->dtype == FFI_S8) return 1;
  fused->lhs.data = memory_for(&fused->lhs, 1);
  if (fused->lhs.data == NULL) return 0;
  return share(make_rows, w, parts(fused->lhs.dims[0], ROWS), threads);
}

void run_epilogue(const work* w, const block* b) {
  const fused_call* fused = w->fused;
  const int64_t columns = fused->sums.dims[1];
  const matrix from = {fused->sums.data, FFI_S32, columns};
  const matrix to = {fused->result->data, fused->result->dtype, columns};
  apply_steps(&fused->epilogue, &from, &to, b);
}

void free_fused_call(fused_call* fused) {
  if (fused->lhs.data != fused->input->data) free(fused->lhs.data);
  if (fused->sums.data != fused->result->data) free(fused->sums.data);
}
