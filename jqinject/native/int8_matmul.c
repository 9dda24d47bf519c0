/* Products of int8 matrices, summed in int32, with the dot product instruction of AVX-512 VNNI.
 *
 *   y[i][j] = sum over t of lhs[i][t] * rhs[j][t],   lhs (..., m, k), rhs (..., n, k), y (..., m, n)
 *
 * The instruction multiplies unsigned bytes by signed ones, so lhs is taken as lhs + 128 (its top bit flipped), and
 * 128 * (sum over t of rhs[j][t]) is taken off again: exact, since sums in int32 wrap around the same way.
 *
 * One line is 64 bytes along k, what one instruction takes. A tile is ROWS x COLUMNS results, whose sums of 16 lanes
 * stay in registers over DEPTH of k. Before it, COLUMNS rows of rhs (they stay in the first-level cache) and a block of
 * lhs (second level) are copied line by line into the order in which the tile reads them, zero where they end early.
 * Blocks of results go to the threads of XLA's pool one by one.
 */
#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "xla_ffi.h"

enum { LINE = 64, ROWS = 3, COLUMNS = 8, DEPTH = 2048 };
enum { BLOCK_ROWS = 192, BLOCK_COLUMNS = 256, BLOCKS_PER_THREAD = 4 };
enum { ALONE = 1 << 19 }; /* multiplications below which one thread does a call */
/* Rows of rhs from the tile at work to the one that is fetched meanwhile: from memory into the second-level cache, half
 * while a tile is packed and half while its first rows are computed, so that memory never rests. */
enum { AHEAD = COLUMNS };
enum { SCRATCH = (BLOCK_ROWS + COLUMNS) * DEPTH };

#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define INLINED static inline __attribute__((always_inline)) VNNI
#define UNROLLED _Pragma("GCC unroll 8") for

/* The intrinsic makes GCC copy the sums at every step; the instruction does not. */
#define ADD_PRODUCTS(sums, bytes, signed_bytes) \
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(signed_bytes))

typedef struct {
  int64_t rows, columns, depth; /* m, n, k */
  const int8_t *lhs, *rhs;
  int32_t* out;
} product;

/* The sums over the lanes of 8 vectors, in one. */
INLINED __m256i lane_sums(const __m512i* v) {
  __m512i pairs[4], fours;
  __m256i halves[2];
  UNROLLED(int i = 0; i < 4; i++)
  pairs[i] =
      _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  UNROLLED(int i = 0; i < 2; i++) {
    fours = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                             _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    halves[i] = _mm256_add_epi32(_mm512_castsi512_si256(fours), _mm512_extracti64x4_epi64(fours, 1));
  }
  return _mm256_add_epi32(_mm256_permute2x128_si256(halves[0], halves[1], 0x20),
                          _mm256_permute2x128_si256(halves[0], halves[1], 0x31));
}

INLINED __m512i line_of(const int8_t* from, int64_t left) {
  return _mm512_maskz_loadu_epi8(left < LINE ? ~0ull >> (LINE - left) : ~0ull, from);
}

/* One tile of `rows` rows. `excess` is what flipping the top bits of lhs added; `kept` are the columns that exist.
 * Fetches COLUMNS / 2 rows of `ahead` meanwhile. */
INLINED void tile(const int rows, const uint8_t* lhs, const int8_t* rhs, int64_t lines, __m256i excess, int32_t* out,
                  int64_t stride, __mmask8 kept, int add, const char* ahead, int64_t ahead_stride) {
  __m512i sums[ROWS][COLUMNS], left[ROWS];
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < COLUMNS; j++) sums[i][j] = _mm512_setzero_si512();
  do {
    UNROLLED(int i = 0; i < rows; i++) left[i] = _mm512_load_si512(lhs + i * LINE);
    UNROLLED(int j = 0; j < COLUMNS; j++) {
      __m512i right = _mm512_load_si512(rhs + j * LINE);
      UNROLLED(int i = 0; i < rows; i++) ADD_PRODUCTS(sums[i][j], left[i], right);
    }
    UNROLLED(int j = 0; j < COLUMNS / 2; j++) _mm_prefetch(ahead + j * ahead_stride, _MM_HINT_T1);
    ahead += LINE;
    lhs += ROWS * LINE;
    rhs += COLUMNS * LINE;
  } while (--lines);
  /* Without this GCC spills inside the loop for the sake of what follows. */
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < COLUMNS; j++) __asm__ volatile("" : "+v"(sums[i][j]));
  UNROLLED(int i = 0; i < rows; i++) {
    __m256i y = _mm256_sub_epi32(lane_sums(sums[i]), excess);
    if (add) y = _mm256_add_epi32(y, _mm256_maskz_loadu_epi32(kept, out + i * stride));
    _mm256_mask_storeu_epi32(out + i * stride, kept, y);
  }
}

#define TILE(rows)                                                                                                    \
  static VNNI __attribute__((noinline)) void tile_##rows(const uint8_t* lhs, const int8_t* rhs, int64_t lines,        \
                                                         __m256i excess, int32_t* out, int64_t stride, __mmask8 kept, \
                                                         int add, const char* ahead, int64_t ahead_stride) {          \
    tile(rows, lhs, rhs, lines, excess, out, stride, kept, add, ahead, ahead_stride);                                 \
  }
TILE(1)
TILE(2)
TILE(3)

/* `rows` rows of lhs, flipped, in the order of tiles. */
static VNNI void pack_lhs(const int8_t* from, int64_t rows, int64_t stride, int64_t depth, uint8_t* to) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  const int64_t lines = (depth + LINE - 1) / LINE;
  for (int64_t i = 0; i < rows; i++) {
    uint8_t* line = to + ((i / ROWS) * lines * ROWS + i % ROWS) * LINE;
    for (int64_t t = 0; t < lines; t++)
      _mm512_store_si512(line + t * ROWS * LINE,
                         _mm512_xor_si512(line_of(from + i * stride + t * LINE, depth - t * LINE), flip));
  }
}

/* At most COLUMNS rows of rhs (the last one again where there are fewer) in the order of tiles, and 128 times their
 * sums. */
static VNNI __m256i pack_rhs(const int8_t* from, int64_t columns, int64_t stride, int64_t depth, int8_t* to) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  const int64_t lines = (depth + LINE - 1) / LINE;
  __m512i sums[COLUMNS];
  for (int j = 0; j < COLUMNS; j++) {
    const int8_t* row = from + (j < columns ? j : columns - 1) * stride;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t t = 0; t < lines; t++) {
      const __m512i line = line_of(row + t * LINE, depth - t * LINE);
      if (j < COLUMNS / 2) _mm_prefetch((const char*)row + (AHEAD * stride + t * LINE), _MM_HINT_T1);
      ADD_PRODUCTS(sum, flip, line);
      _mm512_store_si512(to + (t * COLUMNS + j) * LINE, line);
    }
    sums[j] = sum;
  }
  return lane_sums(sums);
}

/* Results [row, row_end) x [column, column_end); `scratch` holds SCRATCH bytes. */
static VNNI void block(const product* p, int64_t row, int64_t row_end, int64_t column, int64_t column_end,
                       uint8_t* scratch) {
  int8_t* packed_rhs = (int8_t*)scratch + BLOCK_ROWS * DEPTH;
  for (int64_t start = 0; start < p->depth; start += DEPTH) {
    const int64_t depth = p->depth - start < DEPTH ? p->depth - start : DEPTH, lines = (depth + LINE - 1) / LINE;
    pack_lhs(p->lhs + row * p->depth + start, row_end - row, p->depth, depth, scratch);
    for (int64_t j = column; j < column_end; j += COLUMNS) {
      const int64_t columns = column_end - j < COLUMNS ? column_end - j : COLUMNS;
      const __m256i excess = pack_rhs(p->rhs + j * p->depth + start, columns, p->depth, depth, packed_rhs);
      const __mmask8 kept = (__mmask8)(0xff >> (COLUMNS - columns));
      const char* ahead = (const char*)p->rhs + (j + AHEAD + COLUMNS / 2) * p->depth + start;
      for (int64_t i = row; i < row_end; i += ROWS, ahead = (const char*)packed_rhs) {
        const uint8_t* packed_lhs = scratch + (i - row) * lines * LINE;
        int32_t* out = p->out + i * p->columns + j;
        const int64_t step = i == row ? p->depth : 0, left = row_end - i;
        (left == 1   ? tile_1
         : left == 2 ? tile_2
                     : tile_3)(packed_lhs, packed_rhs, lines, excess, out, p->columns, kept, start > 0, ahead, step);
      }
    }
  }
}

/* All products of one call, cut into blocks that any thread may take. */
typedef struct {
  const ffi_buffer *lhs, *rhs, *out;
  int64_t products, row_blocks, column_blocks, block_columns;
  atomic_llong next, finished;
  atomic_int users;
} work;

static int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }
static int64_t at_least(int64_t x, int64_t limit) { return x > limit ? x : limit; }

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

static int64_t blocks_of(const work* w) { return w->products * w->row_blocks * w->column_blocks; }

static void take_blocks(work* w, uint8_t* scratch) {
  for (int64_t i; (i = atomic_fetch_add(&w->next, 1)) < blocks_of(w); atomic_fetch_add(&w->finished, 1)) {
    const product p = product_of(w, i / (w->row_blocks * w->column_blocks));
    const int64_t row = i / w->column_blocks % w->row_blocks * BLOCK_ROWS;
    const int64_t column = i % w->column_blocks * w->block_columns;
    block(&p, row, at_most(row + BLOCK_ROWS, p.rows), column, at_most(column + w->block_columns, p.columns), scratch);
  }
}

static void leave(work* w) {
  if (atomic_fetch_sub(&w->users, 1) == 1) free(w);
}

/* A thread keeps its memory from call to call: to get it from the system costs more than a small product. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_of_thread;

static void make_key(void) { pthread_key_create(&scratch_of_thread, free); }

static uint8_t* scratch_memory(void) {
  pthread_once(&once, make_key);
  uint8_t* scratch = pthread_getspecific(scratch_of_thread);
  if (scratch != NULL) return scratch;
  scratch = aligned_alloc(LINE, SCRATCH);
  if (scratch != NULL) pthread_setspecific(scratch_of_thread, scratch);
  return scratch;
}

static void task(void* data) {
  uint8_t* scratch = scratch_memory();
  if (scratch != NULL) take_blocks(data, scratch);
  leave(data);
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

static void forget(const ffi_call_frame* call, ffi_error* error) {
  ffi_destroy_args args = {sizeof(args), NULL, error};
  call->api->error_destroy(&args);
}

static int64_t threads_of(const ffi_call_frame* call) {
  int64_t threads = 1;
  ffi_threads_args args = {sizeof(args), NULL, call->context, &threads};
  ffi_error* error = call->api->threads(&args);
  if (error == NULL) return threads;
  forget(call, error);
  return 1;
}

/* The work of a call, of which this thread is the first user; NULL without memory. */
static work* work_of(const ffi_call_frame* call, int64_t threads) {
  work* w = malloc(sizeof(*w));
  if (w == NULL) return NULL;
  const ffi_buffer* out = call->results.buffers[0];
  const int64_t rows = out->dims[out->rank - 2], columns = out->dims[out->rank - 1];
  w->lhs = call->args.buffers[0], w->rhs = call->args.buffers[1], w->out = out;
  w->products = 1;
  for (int64_t axis = 0; axis < out->rank - 2; axis++) w->products *= out->dims[axis];
  w->row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  /* Narrower blocks where there would be too few for all threads. */
  const int64_t parts = threads * BLOCKS_PER_THREAD / at_least(w->products * w->row_blocks, 1) + 1;
  const int64_t narrow = (columns / parts + COLUMNS - 1) / COLUMNS * COLUMNS;
  w->block_columns = at_most(at_least(narrow, COLUMNS), BLOCK_COLUMNS);
  w->column_blocks = (columns + w->block_columns - 1) / w->block_columns;
  atomic_init(&w->next, 0);
  atomic_init(&w->finished, 0);
  atomic_init(&w->users, 1);
  return w;
}

/* How many threads a call is worth: to wake one costs more than a small product. */
static int64_t wanted_threads(const ffi_call_frame* call) {
  const ffi_buffer *lhs = call->args.buffers[0], *out = call->results.buffers[0];
  double products = (double)lhs->dims[lhs->rank - 1];
  for (int64_t axis = 0; axis < out->rank; axis++) products *= (double)out->dims[axis];
  return products < ALONE ? 1 : threads_of(call);
}

ffi_error* jqinject_int8_matmul(ffi_call_frame* call) {
  if (call->extensions != NULL && call->extensions->type == FFI_EXTENSION_METADATA) {
    ffi_metadata* metadata = ((ffi_metadata_extension*)call->extensions)->metadata;
    metadata->api_version.major_version = FFI_MAJOR;
    metadata->api_version.minor_version = FFI_MINOR;
    return NULL;
  }
  if (!fits(call)) return refuse(call, "int8_matmul takes int8 (..., m, k) and (..., n, k), gives int32 (..., m, n)");
  const int64_t threads = wanted_threads(call);
  uint8_t* scratch = scratch_memory();
  work* w = scratch == NULL ? NULL : work_of(call, threads);
  if (w == NULL) return refuse(call, "jqinject_int8_matmul: no memory");
  const int64_t helpers = at_most(threads, blocks_of(w)) - 1;
  for (int64_t i = 0; i < helpers; i++) {
    ffi_schedule_args args = {sizeof(args), NULL, call->context, task, w};
    atomic_fetch_add(&w->users, 1);
    ffi_error* error = call->api->schedule(&args);
    if (error == NULL) continue;
    forget(call, error); /* This thread does what no other one takes. */
    leave(w);
    break;
  }
  take_blocks(w, scratch);
  while (atomic_load(&w->finished) < blocks_of(w)) _mm_pause(); /* blocks that others took */
  leave(w);
  return NULL;
}

/* 1: the instructions of the kernel, 2: AMX tiles of int8. */
int jqinject_cpu_features(void) {
  unsigned a, b, c, d;
  const int tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 25 & 1);
  const int dots = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  return dots | tiles << 1;
}
