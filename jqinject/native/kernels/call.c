/* What XLA calls: operands are checked and laid out, products cut into blocks, and the blocks given to threads. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "few_rows.h"
#include "layout.h"
#include "product.h"
#include "threads.h"
#include "xla_ffi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { ALONE = 1 << 19 }; /* multiplications below which one thread does a call */
enum { BLOCKS_PER_THREAD = 8, MOST_OPERANDS = 7 };
enum { INT8_MATMUL, INT4_MATMUL, GROUP_MATMUL, FLOAT_MATMUL };
/* The places of operands. */
enum { LHS, RHS, TABLE, SCALE, ZERO, FORM, LHS_SCALE };

/* The kernels for the vectors of a processor: of each kind of product, for a few rows and for more. */
typedef struct {
  int64_t line;  /* bytes of a vector */
  int64_t block; /* bytes of integers of lhs in a block, which the second-level cache holds; 0 if BLOCK_ROWS rows fit */
  int64_t gap;   /* bytes after a row of integers: rows of a tile a power of 2 apart would share few places of a cache */
  kernel *int8[2], *int4[2], *groups, *floats[2];
  byte_layout* lay_out_bytes; /* NULL if nothing is laid out */
  int as_they_lie;            /* whether int8 beside int8 is not */
  float_layout* lay_out_floats;
  tile_layout* lay_out_tiles;
} vectors;

#if defined(__x86_64__)
static const vectors AVX512 = {.line = 64,
                               .int8 = {int8_rows, int8_tiles},
                               .int4 = {integer_rows_avx512, int8_tiles},
                               .groups = group_tiles_avx512,
                               .floats = {float_rows_avx512, float_tiles_avx512},
                               .lay_out_bytes = lay_out_bytes_avx512,
                               .as_they_lie = 1,
                               .lay_out_floats = lay_out_floats_avx512,
                               .lay_out_tiles = lay_out_tiles_avx512};
static const vectors AVX2 = {.line = 32,
                             .block = 1 << 17,
                             .gap = ALIGNMENT,
                             .int8 = {integer_rows_avx2, integer_rows_avx2},
                             .int4 = {integer_rows_avx2, integer_rows_avx2},
                             .groups = group_tiles_avx2,
                             .floats = {float_rows_avx2, float_tiles_avx2},
                             .lay_out_bytes = lay_out_bytes_avx2,
                             .lay_out_floats = lay_out_floats_avx2,
                             .lay_out_tiles = lay_out_tiles_avx2};
#endif
static const vectors FEW = {.line = 64,
                            .int8 = {few_rows_of_integers, few_rows_of_integers},
                            .int4 = {few_rows_of_integers, few_rows_of_integers},
                            .groups = few_rows_of_groups,
                            .floats = {few_rows_of_floats, few_rows_of_floats}};

/* Those of this processor. Tests set JQINJECT_VECTORS to "few", for what has no vectors, or else for AVX2. */
static const vectors* vectors_of_processor(void) {
#if defined(__x86_64__)
  const char* most = getenv("JQINJECT_VECTORS");
  const int dots = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (dots && most == NULL) return &AVX512;
  if (most != NULL && strcmp(most, "few") == 0) return &FEW;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &AVX2 : NULL;
#elif defined(__aarch64__)
  return &FEW;
#else
  return NULL;
#endif
}

static const vectors* vectors_here(void) {
  static _Atomic(const vectors*) known; /* `known` itself for none */
  const vectors* found = atomic_load(&known);
  if (found == NULL) {
    found = vectors_of_processor();
    atomic_store(&known, found == NULL ? (const vectors*)&known : found);
  }
  return found == (const vectors*)&known ? NULL : found;
}

/* All products of one call. `laid_out` and what follows are of all matrices of lhs, one after the other. */
typedef struct {
  int function;
  const vectors* with;
  const ffi_buffer *const *operands, *out;
  kernel* kernel;
  product whole; /* what all products have in common */
  int64_t products, row_blocks, column_blocks, block_columns, block_rows;
  char* memory;
  char* laid_out;
  float *lane_sums, *lane_scales;
  int32_t* lane_offsets;
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

static int64_t matrices_of(const ffi_buffer* operand) {
  int64_t found = 1;
  for (int64_t axis = 0; axis < operand->rank - 2; axis++) found *= operand->dims[axis];
  return found;
}

/* Its first element. */
static void* element_of(const work* w, int place, int64_t number, int64_t bytes) {
  const ffi_buffer* operand = w->operands[place];
  const int64_t size = operand->dims[operand->rank - 2] * operand->dims[operand->rank - 1];
  return (char*)operand->data + matrix_of(operand, w->out, number) * size * bytes;
}

/* Scales or zero points. */
static given_numbers numbers_of(const work* w, int place, int64_t number) {
  const int dtype = w->operands[place]->dtype;
  return (given_numbers){element_of(w, place, number, dtype == FFI_F32 ? sizeof(float) : 1), dtype};
}

static int has_zero(const work* w) { return w->operands[ZERO]->dims[w->out->rank - 2] != 0; }

/* The numbers of rhs in a line, and the lanes of their sums. */
static int64_t step_of(const work* w) { return w->whole.four_bits ? 2 * w->with->line : w->with->line; }
static int64_t lanes_of(const work* w) { return w->with->line / 4; }

/* Bytes of a row of lhs that is laid out. */
static int64_t laid_out_size(const work* w) {
  const int64_t numbers = w->whole.steps * step_of(w);
  if (w->function == FLOAT_MATMUL) return numbers * (int64_t)sizeof(float);
  return numbers + w->with->gap;
}

static int has_float_tiles(const work* w) { return w->function == FLOAT_MATMUL && w->whole.rows > FEW_FLOAT_ROWS; }

/* Of each matrix of lhs; tiles of floats are whole. */
static int64_t laid_out_rows(const work* w) {
  const int64_t rows = w->whole.rows, unit = has_float_tiles(w) ? MOST_TILE_ROWS : 1;
  return parts(rows, unit) * unit;
}

static product product_of(const work* w, int64_t number) {
  product p = w->whole;
  const int64_t row = matrix_of(w->operands[LHS], w->out, number) * laid_out_rows(w);
  const int64_t lane = row * p.steps * lanes_of(w);
  p.out = (int32_t*)w->out->data + number * p.rows * p.columns;
  p.rhs = element_of(w, RHS, number, 1);
  if (w->function != FLOAT_MATMUL) p.lhs = element_of(w, LHS, number, 1);
  if (w->function == FLOAT_MATMUL) p.floats = element_of(w, LHS, number, sizeof(float));
  p.laid_out = w->laid_out + row * laid_out_size(w);
  if (w->function == INT8_MATMUL) return p;
  p.table = element_of(w, TABLE, number, 1);
  p.values = element_of(w, TABLE, number, sizeof(float));
  if (w->lane_sums != NULL) p.lane_sums = w->lane_sums + lane;
  if (w->lane_offsets != NULL) p.lane_offsets = w->lane_offsets + lane;
  if (w->lane_scales != NULL) p.lane_scales = w->lane_scales + lane;
  if (w->function == INT4_MATMUL) return p;
  p.scale = numbers_of(w, SCALE, number);
  if (has_zero(w)) p.zero = numbers_of(w, ZERO, number);
  if (w->function == GROUP_MATMUL) p.lhs_scale = element_of(w, LHS_SCALE, number, sizeof(float));
  return p;
}

static void do_block(void* data, int64_t number, uint8_t* scratch) {
  const work* w = data;
  const product p = product_of(w, number / (w->row_blocks * w->column_blocks));
  const int64_t row = number / w->column_blocks % w->row_blocks * w->block_rows;
  const int64_t column = number % w->column_blocks * w->block_columns;
  const block b = {row, at_most(row + w->block_rows, p.rows), column, at_most(column + w->block_columns, p.columns)};
  w->kernel(&p, &b, scratch);
}

static ffi_error* refuse(const ffi_call_frame* call, const char* message) {
  ffi_error_args args = {sizeof(args), NULL, message, FFI_INVALID_ARGUMENT};
  return call->api->error_create(&args);
}

/* Whether an operand has the last two sizes, -1 for any, and leading axes as the output, or 1. */
static int has_shape(const ffi_buffer* operand, const ffi_buffer* out, int dtype, int64_t rows, int64_t columns) {
  const int64_t rank = out->rank;
  if (operand->dtype != dtype || operand->rank != rank) return 0;
  for (int64_t axis = 0; axis < rank - 2; axis++)
    if (operand->dims[axis] != 1 && operand->dims[axis] != out->dims[axis]) return 0;
  return (rows < 0 || operand->dims[rank - 2] == rows) && (columns < 0 || operand->dims[rank - 1] == columns);
}

/* Scales or zero points: (groups, columns), or (columns, groups), in one of two dtypes of a byte or in float32. */
static int has_groups(const ffi_buffer* operand, const work* w, int by_column, int dtype, int other) {
  const product* p = &w->whole;
  const int found = operand->dtype == dtype || operand->dtype == other ? operand->dtype : FFI_F32;
  return by_column ? has_shape(operand, w->out, found, p->columns, p->groups)
                   : has_shape(operand, w->out, found, p->groups, p->columns);
}

/* Reads `form`: the size of a group, 0 for one group; and whether scales lie column by column. */
static int read_groups(work* w) {
  product* p = &w->whole;
  const ffi_buffer *form = w->operands[FORM], *zero = w->operands[ZERO];
  if (!has_shape(form, w->out, FFI_S32, 1, 2)) return 0;
  const int64_t group = ((const int32_t*)form->data)[0], by_column = ((const int32_t*)form->data)[1];
  const int64_t step = step_of(w), lanes = lanes_of(w);
  if (group < 0 || (group && (p->depth % group || (step % group && group % step) || group * lanes < step))) return 0;
  if (group && w->function == FLOAT_MATMUL && !p->four_bits && group < 16) return 0;
  p->groups = group ? p->depth / group : 1;
  p->group = p->groups == 1 ? INT64_MAX / 2 : group;
  p->steps_a_group = p->groups == 1 ? UINT32_MAX : (uint32_t)(group / step);
  p->groups_a_step = p->groups == 1 ? 0 : (uint32_t)(step / group);
  if (p->steps_a_group) p->groups_a_step = 0;
  else p->lanes_shift = (uint32_t)__builtin_ctzll((uint64_t)(group * lanes / step));
  p->of_group = by_column ? 1 : p->columns, p->of_column = by_column ? p->groups : 1;
  if (p->groups > MOST_GROUPS) return 0;
  if (!has_groups(w->operands[SCALE], w, by_column != 0, FFI_F8E4M3FN, FFI_F8E8M0FNU)) return 0;
  if (!has_shape(zero, w->out, FFI_F32, 0, -1) && !has_groups(zero, w, by_column != 0, FFI_S8, FFI_U8)) return 0;
  if (w->function == FLOAT_MATMUL) return 1;
  const ffi_buffer* lhs_scale = w->operands[LHS_SCALE];
  p->lhs_groups = lhs_scale->dims[lhs_scale->rank - 1];
  if (!has_shape(lhs_scale, w->out, FFI_F32, p->rows, -1)) return 0;
  const int alike = p->lhs_groups == p->groups && matrices_of(lhs_scale) == matrices_of(w->operands[LHS]);
  return p->lhs_groups == 1 || alike;
}

static int read_operands(work* w, const ffi_call_frame* call, int function) {
  static const int64_t counts[] = {2, 3, 7, 6};
  if (call->args.size != counts[function] || call->results.size != 1) return 0;
  const int floats = function == FLOAT_MATMUL;
  const ffi_buffer *lhs = call->args.buffers[LHS], *rhs = call->args.buffers[RHS], *out = call->results.buffers[0];
  *w = (work){.function = function,
              .with = vectors_here(),
              .operands = (const ffi_buffer* const*)call->args.buffers,
              .out = out};
  if (w->with == NULL) return 0;
  const int64_t rank = out->rank;
  if (rank < 2 || lhs->rank != rank || out->dtype != (function < GROUP_MATMUL ? FFI_S32 : FFI_F32)) return 0;
  product* p = &w->whole;
  p->rows = out->dims[rank - 2], p->columns = out->dims[rank - 1], p->depth = lhs->dims[rank - 1];
  p->four_bits = function != INT8_MATMUL && rhs->dtype == FFI_U8;
  p->rhs_stride = p->four_bits ? (p->depth + 1) / 2 : p->depth;
  p->steps = parts(p->depth, step_of(w)), p->laid_out_stride = laid_out_size(w);
  if (p->depth < 1 || !has_shape(lhs, out, floats ? FFI_F32 : FFI_S8, p->rows, p->depth)) return 0;
  if (!has_shape(rhs, out, p->four_bits ? FFI_U8 : FFI_S8, p->columns, p->rhs_stride)) return 0;
  if (function == INT8_MATMUL) return 1;
  const ffi_buffer* table = w->operands[TABLE];
  if (!has_shape(table, out, floats ? FFI_F32 : FFI_S8, 1, 16) || matrices_of(table) != 1) return 0;
  return function == INT4_MATMUL ? p->four_bits : read_groups(w);
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

/* How many threads a call is worth: to wake one costs more than a small product. */
static int64_t wanted_threads(const work* w, const ffi_call_frame* call) {
  const product* p = &w->whole;
  const double each = (double)p->rows * (double)p->columns * (double)p->depth;
  return each * (double)w->products < ALONE ? 1 : threads_of(call);
}

static kernel* kernel_of(const work* w) {
  const vectors* with = w->with;
  const int many = w->whole.rows > FEW_ROWS;
  if (w->function == GROUP_MATMUL) return with->groups;
  if (w->function == FLOAT_MATMUL) return with->floats[has_float_tiles(w)];
  return w->whole.four_bits ? with->int4[many] : with->int8[many];
}

/* The most rows of a block. */
static int64_t rows_of_block(const work* w) {
  if (w->with->block == 0 || w->function == FLOAT_MATMUL) return BLOCK_ROWS;
  const int64_t size = laid_out_size(w) + (w->function == GROUP_MATMUL ? w->whole.steps * w->with->line : 0);
  return at_most(at_least(w->with->block / size / 8, 1) * 8, BLOCK_ROWS);
}

static void cut_into_blocks(work* w, int64_t threads) {
  const product* p = &w->whole;
  w->kernel = kernel_of(w);
  w->block_rows = rows_of_block(w);
  w->row_blocks = parts(p->rows, w->block_rows);
  /* Narrower blocks where there would be too few for all threads. */
  const int64_t pieces = threads * BLOCKS_PER_THREAD / at_least(w->products * w->row_blocks, 1) + 1;
  const int64_t narrow = parts(p->columns / pieces, WIDEST_STRIPE) * WIDEST_STRIPE;
  w->block_columns = at_most(at_least(narrow, WIDEST_STRIPE), BLOCK_COLUMNS);
  w->column_blocks = parts(p->columns, w->block_columns);
}

/* A scale for each lane of each step. */
static void lay_out_scales(const work* w, const float* from, int64_t rows, float* to) {
  const product* p = &w->whole;
  const int64_t lanes = lanes_of(w), numbers = step_of(w) / lanes;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t lane = 0; lane < p->steps * lanes; lane++)
      *to++ = from[i * p->groups + at_most(lane * numbers / p->group, p->groups - 1)];
}

/* MOST_TILE_ROWS rows of lhs, or those that are left of a matrix, as tiles of floats. */
static void lay_out_tiles(const work* w, int64_t number) {
  const product* p = &w->whole;
  const int64_t parts_of_matrix = laid_out_rows(w) / MOST_TILE_ROWS, padded = p->steps * step_of(w);
  const int64_t row = number % parts_of_matrix * MOST_TILE_ROWS, matrix = number / parts_of_matrix;
  const float* from = (const float*)w->operands[LHS]->data + (matrix * p->rows + row) * p->depth;
  float* to = (float*)w->laid_out + number * MOST_TILE_ROWS * padded;
  w->with->lay_out_tiles(from, at_most(p->rows - row, MOST_TILE_ROWS), p->depth, padded, to);
}

/* So many rows of all matrices of lhs, or those that are left. */
static void lay_out_rows(void* data, int64_t number, uint8_t* scratch) {
  (void)scratch;
  const work* w = data;
  if (has_float_tiles(w)) {
    lay_out_tiles(w, number);
    return;
  }
  const product* p = &w->whole;
  const ffi_buffer* lhs = w->operands[LHS];
  const int64_t row = number * MOST_TILE_ROWS, lane = row * p->steps * lanes_of(w);
  const int64_t rows = at_most(matrices_of(lhs) * p->rows - row, MOST_TILE_ROWS);
  float* sums = w->lane_sums == NULL ? NULL : w->lane_sums + lane;
  char* to = w->laid_out + row * laid_out_size(w);
  if (w->function == FLOAT_MATMUL) {
    const float* from = (const float*)lhs->data + row * p->depth;
    w->with->lay_out_floats(from, rows, p->depth, p->four_bits, (float*)to, sums);
    return;
  }
  const product first = product_of(w, 0);
  const byte_sums found = {sums, w->lane_offsets == NULL ? NULL : w->lane_offsets + lane};
  w->with->lay_out_bytes(&first, (const int8_t*)lhs->data + row * p->depth, rows, (int8_t*)to, found);
  if (w->lane_scales == NULL) return;
  const float* scales = w->operands[LHS_SCALE]->data;
  lay_out_scales(w, scales + row * p->groups, rows, w->lane_scales + lane);
}

/* Lays out lhs for the call; 0 without memory. */
static int lay_out(work* w, int64_t threads) {
  const product* p = &w->whole;
  const int groups = w->function == GROUP_MATMUL;
  if (w->with->lay_out_bytes == NULL || (w->function == INT8_MATMUL && w->with->as_they_lie)) return 1;
  const int64_t rows = matrices_of(w->operands[LHS]) * laid_out_rows(w);
  const int64_t bytes = rows * laid_out_size(w), of_lanes = rows * p->steps * w->with->line;
  w->memory = aligned_alloc(ALIGNMENT, (size_t)(parts(bytes + 3 * of_lanes, ALIGNMENT) * ALIGNMENT));
  if (w->memory == NULL) return 0;
  w->laid_out = w->memory;
  if (groups || (w->function == FLOAT_MATMUL && has_zero(w))) w->lane_sums = (float*)(w->memory + bytes);
  if (groups) w->lane_offsets = (int32_t*)(w->memory + bytes + of_lanes);
  if (groups && p->lhs_groups > 1) w->lane_scales = (float*)(w->memory + bytes + 2 * of_lanes);
  return share(lay_out_rows, w, parts(rows, MOST_TILE_ROWS), threads);
}

static ffi_error* multiply(ffi_call_frame* call, int function, const char* wanted) {
  if (call->extensions != NULL && call->extensions->type == FFI_EXTENSION_METADATA) {
    ffi_metadata* metadata = ((ffi_metadata_extension*)call->extensions)->metadata;
    metadata->api_version.major_version = FFI_MAJOR;
    metadata->api_version.minor_version = FFI_MINOR;
    return NULL;
  }
  work w;
  if (!read_operands(&w, call, function)) return refuse(call, wanted);
  w.products = matrices_of(w.out);
  const int64_t threads = wanted_threads(&w, call);
  cut_into_blocks(&w, threads);
  const int64_t blocks = w.products * w.row_blocks * w.column_blocks;
  const int done = blocks == 0 || (lay_out(&w, threads) && share(do_block, &w, blocks, threads));
  free(w.memory);
  return done ? NULL : refuse(call, "jqinject's kernels: no memory");
}

#define FUNCTION(name, function, wanted) \
  EXPORTED ffi_error* jqinject_##name(ffi_call_frame* call) { return multiply(call, function, #name " takes " wanted); }

FUNCTION(int8_matmul, INT8_MATMUL, "int8 (..., m, k) and (..., n, k), gives int32 (..., m, n)")
FUNCTION(int4_matmul, INT4_MATMUL, "int8 (..., m, k), uint8 (..., n, ceil(k / 2)) and an int8 table, gives int32")
FUNCTION(group_matmul, GROUP_MATMUL, "int8, int8 or uint8, an int8 table, scales, zero points, a form, scales of lhs")
FUNCTION(float_matmul, FLOAT_MATMUL, "float32, int8 or uint8, a float32 table, scales, zero points and a form")

/* 1: AVX-512 VNNI, 2: AMX tiles of int8, 4: kernels for a few rows alone, 8: AVX2. */
EXPORTED int jqinject_cpu_features(void) {
  const vectors* here = vectors_here();
  int tiles = 0;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 25 & 1);
  if (here == &AVX512) return 1 | tiles << 1;
  if (here == &AVX2) return 8 | tiles << 1;
#endif
  return (here == &FEW) << 2 | tiles << 1;
}
