/* The largest magnitude of each row, and what steps make of it: a scale for each row. */
#include <string.h>

#include "handler.h"
#include "product.h"
#include "steps.h"
#include "threads.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2")))
#else
#define TARGET
#endif

enum { LANES_OF_ROW = 16, NUMBERS = 1 << 15 }; /* numbers of a part of the job */

typedef struct {
  const float* from;
  float* to;
  int64_t rows, columns, rows_of_part;
  steps epilogue;
} reduction;

/* Without the sign, floats are in the order of their bits as integers, and a nan is the largest, which is kept. */
static TARGET int32_t largest_bits(const float* row, int64_t columns) {
  int32_t most[LANES_OF_ROW] = {0}, bits[LANES_OF_ROW];
  for (int64_t column = 0; column < columns; column += LANES_OF_ROW) {
    const int64_t count = at_most(columns - column, LANES_OF_ROW);
    /* A copy of constant size becomes a load. */
    if (count == LANES_OF_ROW) {
      memcpy(bits, row + column, sizeof(bits));
    } else {
      memset(bits, 0, sizeof(bits));
      memcpy(bits, row + column, (size_t)count * sizeof(float));
    }
    for (int i = 0; i < LANES_OF_ROW; i++) {
      const int32_t size = bits[i] & 0x7fffffff;
      most[i] = size > most[i] ? size : most[i];
    }
  }
  for (int i = 1; i < LANES_OF_ROW; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
  return most[0];
}

static void some_rows(void* data, int64_t number, uint8_t* scratch) {
  (void)scratch;
  const reduction* r = data;
  const block b = {number * r->rows_of_part, at_most((number + 1) * r->rows_of_part, r->rows), 0, 1};
  for (int64_t row = b.row; row < b.row_end; row++) {
    const int32_t bits = largest_bits(r->from + row * r->columns, r->columns);
    memcpy(r->to + row, &bits, sizeof(bits));
  }
  const matrix rows = {r->to, FFI_F32, 1};
  apply_steps(&r->epilogue, &rows, &rows, &b);
}

static const char WANTED[] =
    "row_amax takes float32 (m, k), int32 codes of steps, and their operands, gives float32 (m, 1)";

EXPORTED ffi_error* jqinject_row_amax(ffi_call_frame* call) {
  if (is_about_version(call)) return NULL;
  if (call->args.size < 2 || call->results.size != 1) return refuse(call, WANTED);
  ffi_buffer *const* next = call->args.buffers + 2, *const* end = call->args.buffers + call->args.size;
  const ffi_buffer *x = call->args.buffers[0], *codes = call->args.buffers[1], *out = call->results.buffers[0];
  const int fits = x->dtype == FFI_F32 && x->rank == 2 && out->dtype == FFI_F32 && out->rank == 2 &&
                   out->dims[0] == x->dims[0] && out->dims[1] == 1 && codes->dtype == FFI_S32 && codes->rank == 1;
  if (!fits) return refuse(call, WANTED);
  const int64_t columns = x->dims[1], rows_of_part = at_least(NUMBERS / at_least(columns, 1), 1);
  reduction r = {x->data, out->data, x->dims[0], columns, rows_of_part, {.count = 0}};
  if (!read_steps(&r.epilogue, codes->data, codes->dims[0], r.rows, 1, &next, end) || next != end)
    return refuse(call, WANTED);
  if (codes->dims[0] > 0 && *(const int32_t*)codes->data == SUBTRACT_INTEGER) return refuse(call, WANTED);
  const int done = share(some_rows, &r, parts(r.rows, rows_of_part), threads_of(call));
  return done ? NULL : refuse(call, "jqinject's kernels: no memory");
}
