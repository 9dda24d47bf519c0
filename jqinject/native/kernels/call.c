/* What XLA calls: operands are laid out, products cut into blocks, and the blocks given to threads. */
#include <stdlib.h>

#include "fused_call.h"
#include "handler.h"
#include "operands.h"
#include "threads.h"

enum { ALONE = 1 << 19 }; /* multiplications below which one thread does a call */
enum { BLOCKS_PER_THREAD = 8 };

static void do_block(void* data, int64_t number, uint8_t* scratch) {
  const work* w = data;
  const product p = product_of(w, number / (w->row_blocks * w->column_blocks));
  const int64_t row = number / w->column_blocks % w->row_blocks * w->block_rows;
  const int64_t column = number % w->column_blocks * w->block_columns;
  const block b = {row, at_most(row + w->block_rows, p.rows), column, at_most(column + w->block_columns, p.columns)};
  w->kernel(&p, &b, scratch);
  if (w->fused != NULL) run_epilogue(w, &b);
}

/* How many threads a call is worth: to wake one costs more than a small product. */
static int64_t wanted_threads(const work* w, const ffi_call_frame* call) {
  const product* p = &w->whole;
  const double each = (double)p->rows * (double)p->columns * (double)p->depth;
  return each * (double)w->products < ALONE ? 1 : threads_of(call);
}

static kernel* kernel_of(const work* w) {
  const kernel_set* with = w->with;
  const int many = has_many_rows(w);
  if (w->function == GROUP_MATMUL) return with->groups[many];
  if (w->function == FLOAT_MATMUL) return with->floats[many];
  return w->whole.four_bits ? with->int4[many] : with->int8[many];
}

/* The most rows of a block. */
static int64_t rows_of_block(const work* w) {
  if (w->function == FLOAT_MATMUL) return w->with->float_rows;
  if (w->with->block == 0) return BLOCK_ROWS;
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
  const int64_t narrow = parts(p->columns / pieces, WIDEST_PANEL) * WIDEST_PANEL;
  w->block_columns = at_most(at_least(narrow, WIDEST_PANEL), BLOCK_COLUMNS);
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

/* The same as tiles of bytes. */
static void lay_out_byte_tiles_of(const work* w, int64_t number) {
  const int64_t parts_of_matrix = laid_out_rows(w) / MOST_TILE_ROWS;
  const int64_t row = number % parts_of_matrix * MOST_TILE_ROWS, matrix = number / parts_of_matrix;
  product p = product_of(w, 0); /* all products have the same table */
  const int64_t given = matrix * p.rows + row, laid_out = number * MOST_TILE_ROWS, sum = laid_out * sums_in_row(w);
  const int8_t* from = (const int8_t*)w->operands[LHS]->data + given * p.depth;
  const float* scales = w->lane_scales == NULL ? NULL : (const float*)w->operands[LHS_SCALE]->data + given * p.groups;
  const piece_numbers found = {w->lane_sums + sum, w->lane_scales == NULL ? NULL : w->lane_scales + sum,
                               w->lane_offsets + sum};
  w->with->lay_out_byte_tiles(&p, from, at_most(p.rows - row, MOST_TILE_ROWS), scales,
                              (int8_t*)w->laid_out + laid_out * laid_out_size(w), found);
}

/* So many rows of all matrices of lhs, or those that are left. */
static void lay_out_rows(void* data, int64_t number, uint8_t* scratch) {
  (void)scratch;
  const work* w = data;
  if (has_float_tiles(w)) {
    lay_out_tiles(w, number);
    return;
  }
  if (has_byte_tiles(w)) {
    lay_out_byte_tiles_of(w, number);
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
  const int64_t bytes = rows * laid_out_size(w);
  const int64_t of_lanes = parts(rows * sums_in_row(w) * (int64_t)sizeof(float), ALIGNMENT) * ALIGNMENT;
  w->memory = aligned_alloc(ALIGNMENT, (size_t)(parts(bytes + 3 * of_lanes, ALIGNMENT) * ALIGNMENT));
  if (w->memory == NULL) return 0;
  w->laid_out = w->memory;
  if (groups || (w->function == FLOAT_MATMUL && has_zero(w))) w->lane_sums = (float*)(w->memory + bytes);
  if (groups) w->lane_offsets = (int32_t*)(w->memory + bytes + of_lanes);
  if (groups && p->lhs_groups > 1) w->lane_scales = (float*)(w->memory + bytes + 2 * of_lanes);
  return share(lay_out_rows, w, parts(rows, MOST_TILE_ROWS), threads);
}

static ffi_error* compute(work* w, const ffi_call_frame* call) {
  w->products = matrices_of(w->out);
  const int64_t threads = wanted_threads(w, call);
  cut_into_blocks(w, threads);
  const int64_t blocks = w->products * w->row_blocks * w->column_blocks;
  const int done = blocks == 0 || ((w->fused == NULL || run_prologue(w, threads)) && lay_out(w, threads) &&
                                   share(do_block, w, blocks, threads));
  free(w->memory);
  return done ? NULL : refuse(call, "jqinject's kernels: no memory");
}

static ffi_error* multiply(ffi_call_frame* call, int function, const char* wanted) {
  if (is_about_version(call)) return NULL;
  work w;
  const ffi_buffer* const* operands = (const ffi_buffer* const*)call->args.buffers;
  if (call->results.size != 1 || !read_operands(&w, operands, call->args.size, call->results.buffers[0], function))
    return refuse(call, wanted);
  return compute(&w, call);
}

EXPORTED ffi_error* jqinject_fused_matmul(ffi_call_frame* call) {
  if (is_about_version(call)) return NULL;
  work w;
  fused_call fused;
  if (!read_fused_call(&w, &fused, call))
    return refuse(call, "fused_matmul takes (m, k), int8 (n, k), int32 codes of steps, and their operands");
  ffi_error* error = compute(&w, call);
  free_fused_call(&fused);
  return error;
}

#define FUNCTION(name, function, wanted) \
  EXPORTED ffi_error* jqinject_##name(ffi_call_frame* call) { return multiply(call, function, #name " takes " wanted); }

FUNCTION(int8_matmul, INT8_MATMUL, "int8 (..., m, k) and (..., n, k), gives int32 (..., m, n)")
FUNCTION(int4_matmul, INT4_MATMUL, "int8 (..., m, k), uint8 (..., n, ceil(k / 2)) and an int8 table, gives int32")
FUNCTION(group_matmul, GROUP_MATMUL, "int8, int8 or uint8, an int8 table, scales, zero points, a form, scales of lhs")
FUNCTION(float_matmul, FLOAT_MATMUL, "float32, int8 or uint8, a float32 table, scales, zero points and a form")
