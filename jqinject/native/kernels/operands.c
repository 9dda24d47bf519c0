/* Operands are checked before anything is read of them, and taken apart into those of each product. */
#include "operands.h"

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

int64_t matrices_of(const ffi_buffer* operand) {
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

int has_zero(const work* w) { return w->operands[ZERO]->dims[w->out->rank - 2] != 0; }

int64_t step_of(const work* w) { return w->whole.four_bits ? 2 * w->with->line : w->with->line; }
int64_t lanes_of(const work* w) { return w->with->line / 4; }

int64_t laid_out_size(const work* w) {
  const int64_t numbers = w->whole.steps * step_of(w);
  if (w->function == FLOAT_MATMUL) return numbers * (int64_t)sizeof(float);
  return numbers + w->with->gap;
}

int has_many_rows(const work* w) {
  static const int64_t few[] = {FEW_ROWS, FEW_ROWS, FEW_GROUP_ROWS, FEW_FLOAT_ROWS};
  return w->whole.rows > few[w->function];
}

int has_float_tiles(const work* w) { return w->function == FLOAT_MATMUL && has_many_rows(w); }

int has_byte_tiles(const work* w) {
  return w->function == GROUP_MATMUL && w->with->lay_out_byte_tiles != NULL && has_many_rows(w);
}

int64_t laid_out_rows(const work* w) {
  const int64_t rows = w->whole.rows, tiles = has_float_tiles(w) || has_byte_tiles(w), unit = tiles ? MOST_TILE_ROWS : 1;
  return parts(rows, unit) * unit;
}

int64_t sums_in_row(const work* w) { return has_byte_tiles(w) ? w->whole.pieces : w->whole.steps * lanes_of(w); }

product product_of(const work* w, int64_t number) {
  product p = w->whole;
  const int64_t row = matrix_of(w->operands[LHS], w->out, number) * laid_out_rows(w);
  const int64_t lane = row * sums_in_row(w);
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

/* Reads the table and what follows. */
static int read_numbers(work* w) {
  const ffi_buffer* table = w->operands[TABLE];
  const int dtype = w->function == FLOAT_MATMUL ? FFI_F32 : FFI_S8;
  if (!has_shape(table, w->out, dtype, 1, 16) || matrices_of(table) != 1) return 0;
  return w->function == INT4_MATMUL ? w->whole.four_bits : read_groups(w);
}

int read_operands(work* w, const ffi_buffer* const* operands, int64_t count, const ffi_buffer* out, int function) {
  static const int64_t counts[] = {2, 3, 7, 6};
  if (count != counts[function]) return 0;
  const int floats = function == FLOAT_MATMUL;
  const ffi_buffer *lhs = operands[LHS], *rhs = operands[RHS];
  *w = (work){.function = function, .with = kernels_here(), .operands = operands, .out = out};
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
  p->groups = 1;
  if (function != INT8_MATMUL && !read_numbers(w)) return 0;
  const int64_t size = p->groups > 1 ? p->group : p->depth;
  p->piece = at_most(size, PIECE), p->pieces_a_group = parts(size, p->piece);
  p->pieces = p->groups * p->pieces_a_group;
  return 1;
}
