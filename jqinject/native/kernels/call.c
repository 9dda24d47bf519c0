/* What XLA calls: the operands are checked, the products cut into blocks, and the blocks given to threads. */
#include "product.h"
#include "threads.h"
#include "xla_ffi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { ALONE = 1 << 19 }; /* multiplications below which one thread does a call */
enum { BLOCKS_PER_THREAD = 8 };

/* All products of one call. */
typedef struct {
  const ffi_buffer *lhs, *rhs, *out;
  kernel* kernel;
  int64_t products, row_blocks, column_blocks, block_columns;
} work;

/* The matrix of an operand that product `number` takes: leading axes of size 1 are broadcast. */
static int64_t matrix_of(const ffi_buffer* operand, const ffi_buffer* out, int64_t number) {
  int64_t index = 0, size = 1;
  for (int64_t axis = out->rank - 3; axis >= 0; axis--) {
    if (operand->dims[axis] != 1) index += number % out->dims[axis] * size;
    size *= operand->dims[axis];
    number /= out->dims[axis];
  }
  return index;
}

static product product_of(const work* w, int64_t number) {
  const int64_t last = w->out->rank - 1;
  product p = {.rows = w->out->dims[last - 1], .columns = w->out->dims[last], .depth = w->lhs->dims[last]};
  p.lhs = (const int8_t*)w->lhs->data + matrix_of(w->lhs, w->out, number) * p.rows * p.depth;
  p.rhs = (const int8_t*)w->rhs->data + matrix_of(w->rhs, w->out, number) * p.columns * p.depth;
  p.out = (int32_t*)w->out->data + number * p.rows * p.columns;
  return p;
}

static void do_block(void* data, int64_t number, uint8_t* scratch) {
  const work* w = data;
  const product p = product_of(w, number / (w->row_blocks * w->column_blocks));
  const int64_t row = number / w->column_blocks % w->row_blocks * BLOCK_ROWS;
  const int64_t column = number % w->column_blocks * w->block_columns;
  const block b = {row, at_most(row + BLOCK_ROWS, p.rows), column, at_most(column + w->block_columns, p.columns)};
  w->kernel(&p, &b, scratch);
}

static ffi_error* refuse(const ffi_call_frame* call, const char* message) {
  ffi_error_args args = {sizeof(args), NULL, message, FFI_INVALID_ARGUMENT};
  return call->api->error_create(&args);
}

static int fits(const ffi_call_frame* call) {
  if (call->args.size != 2 || call->results.size != 1) return 0;
  const ffi_buffer *lhs = call->args.buffers[0], *rhs = call->args.buffers[1], *out = call->results.buffers[0];
  const int64_t rank = out->rank;
  if (lhs->dtype != FFI_S8 || rhs->dtype != FFI_S8 || out->dtype != FFI_S32) return 0;
  if (rank < 2 || lhs->rank != rank || rhs->rank != rank) return 0;
  for (int64_t axis = 0; axis < rank - 2; axis++)
    if ((lhs->dims[axis] != 1 && lhs->dims[axis] != out->dims[axis]) ||
        (rhs->dims[axis] != 1 && rhs->dims[axis] != out->dims[axis]))
      return 0;
  return lhs->dims[rank - 1] == rhs->dims[rank - 1] && lhs->dims[rank - 1] > 0 &&
         lhs->dims[rank - 2] == out->dims[rank - 2] && rhs->dims[rank - 2] == out->dims[rank - 1];
}

static int64_t threads_of(const ffi_call_frame* call) {
  int64_t threads = 1;
  ffi_threads_args args = {sizeof(args), NULL, call->context, &threads};
  ffi_error* error = call->api->threads(&args);
  if (error == NULL) return threads;
  ffi_destroy_args destroy = {sizeof(destroy), NULL, error};
  call->api->error_destroy(&destroy);
  return 1;
}

static work work_of(const ffi_call_frame* call, int64_t threads) {
  const ffi_buffer* out = call->results.buffers[0];
  const int64_t rows = out->dims[out->rank - 2], columns = out->dims[out->rank - 1];
  work w = {.lhs = call->args.buffers[0], .rhs = call->args.buffers[1], .out = out, .products = 1};
  for (int64_t axis = 0; axis < out->rank - 2; axis++) w.products *= out->dims[axis];
  w.kernel = rows <= FEW_ROWS ? int8_rows : int8_tiles;
  w.row_blocks = parts(rows, BLOCK_ROWS);
  /* Narrower blocks where there would be too few for all threads. */
  const int64_t pieces = threads * BLOCKS_PER_THREAD / at_least(w.products * w.row_blocks, 1) + 1;
  const int64_t narrow = parts(columns / pieces, TILE_COLUMNS) * TILE_COLUMNS;
  w.block_columns = at_most(at_least(narrow, TILE_COLUMNS), BLOCK_COLUMNS);
  w.column_blocks = parts(columns, w.block_columns);
  return w;
}

/* How many threads a call is worth: to wake one costs more than a small product. */
static int64_t wanted_threads(const ffi_call_frame* call) {
  const ffi_buffer *lhs = call->args.buffers[0], *out = call->results.buffers[0];
  double products = (double)lhs->dims[lhs->rank - 1];
  for (int64_t axis = 0; axis < out->rank; axis++) products *= (double)out->dims[axis];
  return products < ALONE ? 1 : threads_of(call);
}

EXPORTED ffi_error* jqinject_int8_matmul(ffi_call_frame* call) {
  if (call->extensions != NULL && call->extensions->type == FFI_EXTENSION_METADATA) {
    ffi_metadata* metadata = ((ffi_metadata_extension*)call->extensions)->metadata;
    metadata->api_version.major_version = FFI_MAJOR;
    metadata->api_version.minor_version = FFI_MINOR;
    return NULL;
  }
  if (!fits(call)) return refuse(call, "int8_matmul takes int8 (..., m, k) and (..., n, k), gives int32 (..., m, n)");
  const int64_t threads = wanted_threads(call);
  work w = work_of(call, threads);
  const int64_t blocks = w.products * w.row_blocks * w.column_blocks;
  return share(do_block, &w, blocks, threads) ? NULL : refuse(call, "jqinject_int8_matmul: no memory");
}

/* 1: the instructions of the kernels, 2: AMX tiles of int8. */
EXPORTED int jqinject_cpu_features(void) {
  unsigned a, b, c, d;
  const int tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 25 & 1);
  const int dots = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  return dots | tiles << 1;
}
