/* A layer in one call: numbers become bytes, these are multiplied, and the sums become numbers, or the next layer's bytes.
 *
 * Without this XLA runs a loop between two products, which reads sums from memory and writes bytes to it, and starts
 * threads anew. Here each block is finished while its sums are in a cache.
 */
#include "around.h"

#include <stdlib.h>

#include "threads.h"

enum { ROWS = 8 }; /* of lhs, made at once */

/* The operands: what lhs is made of, rhs, codes of steps after their number before the product, operands of steps. */
int read_surroundings(work* w, surroundings* around, const ffi_call_frame* call) {
  if (call->args.size < 3 || call->results.size != 1) return 0;
  ffi_buffer* const* all = call->args.buffers;
  const ffi_buffer *given = all[0], *rhs = all[1], *codes = all[2], *result = call->results.buffers[0];
  *around = (surroundings){.given = given, .result = result, .operands = {&around->lhs, rhs}};
  if (given->rank != 2 || result->rank != 2 || codes->rank != 1 || codes->dtype != FFI_S32 || codes->dims[0] < 1)
    return 0;
  if (given->dtype != FFI_F32 && given->dtype != FFI_BF16 && given->dtype != FFI_S8) return 0;
  if (result->dtype != FFI_F32 && result->dtype != FFI_BF16 && result->dtype != FFI_S8) return 0;
  const int32_t* code = codes->data;
  const int64_t before = *code++, after = codes->dims[0] - 1 - before;
  ffi_buffer *const* next = all + 3, *const* end = all + call->args.size;
  if (!read_steps(&around->before, code, before, given->dims[0], given->dims[1], &next, end)) return 0;
  if (given->dtype == FFI_S8 && before != 0) return 0;
  if (before > 0 && *code == SUBTRACT_INTEGER) return 0;
  if (!read_steps(&around->after, code + before, after, result->dims[0], result->dims[1], &next, end)) return 0;
  around->lhs = *given, around->sums = *result;
  around->lhs.dtype = FFI_S8, around->sums.dtype = FFI_S32;
  if (next != end || !read_operands(w, around->operands, 2, &around->sums, INT8_MATMUL)) return 0;
  w->around = around;
  return 1;
}

static void make_rows(void* data, int64_t number, uint8_t* scratch) {
  (void)scratch;
  const surroundings* around = ((const work*)data)->around;
  const int64_t rows = around->given->dims[0], depth = around->given->dims[1];
  const matrix from = {around->given->data, around->given->dtype, depth}, to = {around->lhs.data, FFI_S8, depth};
  const block b = {number * ROWS, at_most((number + 1) * ROWS, rows), 0, depth};
  apply_steps(&around->before, &from, &to, &b);
}

static void* memory_for(const ffi_buffer* x, int64_t bytes) {
  return aligned_alloc(ALIGNMENT, (size_t)(parts(x->dims[0] * x->dims[1] * bytes, ALIGNMENT) * ALIGNMENT));
}

int make_lhs(work* w, int64_t threads) {
  surroundings* around = w->around;
  if (around->result->dtype != FFI_F32) { /* sums take the place of their results otherwise */
    around->sums.data = memory_for(&around->sums, sizeof(int32_t));
    if (around->sums.data == NULL) return 0;
  }
  if (around->given->dtype == FFI_S8) return 1;
  around->lhs.data = memory_for(&around->lhs, 1);
  if (around->lhs.data == NULL) return 0;
  return share(make_rows, w, parts(around->lhs.dims[0], ROWS), threads);
}

void finish_block(const work* w, const block* b) {
  const surroundings* around = w->around;
  const int64_t columns = around->sums.dims[1];
  const matrix from = {around->sums.data, FFI_S32, columns};
  const matrix to = {around->result->data, around->result->dtype, columns};
  apply_steps(&around->after, &from, &to, b);
}

void free_surroundings(surroundings* around) {
  if (around->lhs.data != around->given->data) free(around->lhs.data);
  if (around->sums.data != around->result->data) free(around->sums.data);
}
