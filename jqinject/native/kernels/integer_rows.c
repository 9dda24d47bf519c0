/* int8 times numbers in 4 bits, summed in int32; with AVX2 int8 times int8 as well.
 *
 * rhs is read once, row by row as it lies. A line of it are twice as many indices as bytes, which become bytes in registers:
 * differences from the least number of the table, an instruction's unsigned operand (see unsigned_lines). What that takes
 * off is put on again: the least number times the sum of the row of lhs. lhs is laid out as the halves of a byte are: the
 * numbers at even places, then those at odd ones (see layout.c), and stays in the first-level cache. A tile is a few rows
 * times a few columns, whose sums stay in registers over the whole depth.
 */
#include "vectors.h"

#if defined(__x86_64__)

enum { LARGEST = 8, MOST_COLUMNS = 8 }; /* of a tile */

/* Steps of the depth; all but the first ones are added to those before. */
typedef struct {
  int64_t first, end;
} steps;

INLINED void tile(const unsigned_kind kind, const int rows, const int columns, const product* p, steps s, int64_t row,
                  int64_t column, ivec key, const int32_t* missing) {
  const int count = rows * columns;
  const int64_t bytes = kind == BYTES ? p->depth : (p->depth + 1) / 2, span = LINES(kind) * LINE, stride = p->laid_out_stride;
  const int8_t* x = (const int8_t*)p->laid_out + row * stride + s.first * span;
  const uint8_t* rhs = (const uint8_t*)p->rhs + column * p->rhs_stride;
  ivec sums[2 * LARGEST];
  UNROLLED(int n = 0; n < count; n++) sums[n] = no_integers();
  for (int64_t start = s.first * LINE; start < s.end * LINE; start += LINE, x += span) {
    ivec w[MOST_COLUMNS][2];
    UNROLLED(int j = 0; j < columns; j++) {
      const uint8_t* line = rhs + j * p->rhs_stride;
      _mm_prefetch((const char*)line + columns * p->rhs_stride + start, _MM_HINT_T0);
      unsigned_lines(kind, key, packed_line(line, start, bytes), w[j]);
      if (rows > 1 && HOLDS_LINES) continue;
      UNROLLED(int i = 0; i < rows; i++)
      sums[j * rows + i] = with_products(kind, sums[j * rows + i], w[j], x + i * stride);
    }
    if (rows > 1 && HOLDS_LINES)
      UNROLLED(int i = 0; i < rows; i++)
      UNROLLED(int j = 0; j < columns; j++)
      sums[j * rows + i] = with_products(kind, sums[j * rows + i], w[j], x + i * stride);
  }
  int32_t found[2 * LARGEST];
  totals(sums, count, found);
  UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++) {
    int32_t* out = p->out + (row + i) * p->columns + column + j;
    const uint32_t before = (uint32_t)(s.first == 0 ? missing[i] : *out);
    *out = (int32_t)((uint32_t)found[j * rows + i] + before); /* wraps around */
  }
}

typedef void tiles(const product* p, const block* b, steps s, int64_t row, ivec key, const int32_t* missing);

#define ROWS_OF(kind, rows, columns)                                                                               \
  static TARGET __attribute__((noinline)) void kind##_##rows(const product* p, const block* b, steps s, int64_t row, \
                                                             ivec key, const int32_t* missing) {                   \
    int64_t j = b->column;                                                                                         \
    for (; j + columns <= b->column_end; j += columns) tile(kind, rows, columns, p, s, row, j, key, missing);      \
    for (; j < b->column_end; j++) tile(kind, rows, 1, p, s, row, j, key, missing);                                \
  }
KINDS(INTEGER_TILES)
#define CHOICES(kind) {kind##_1, kind##_2, kind##_4, kind##_8},

/* If the rows need several tiles, the depth in pieces of which a tile's lhs stays in the first-level cache, and the columns
 * in pieces whose rhs does. */
TARGET void NAMED(integer_rows)(const product* p, const block* b, uint8_t* scratch) {
  (void)scratch;
  static tiles* const choices[3][4] = {KINDS(CHOICES)};
  const unsigned_form form = unsigned_form_of(p);
  tiles* const* chosen = choices[form.kind];
  int32_t missing[BLOCK_ROWS];
  for (int64_t i = b->row; i < b->row_end; i++)
    missing[i - b->row] = (int32_t)((uint32_t)form.least * (uint32_t)row_sum(p->lhs + i * p->depth, p->depth));
  const int several = b->row_end - b->row > LARGEST;
  const int64_t width = several ? 8 : b->column_end - b->column, depth = several ? PIECE_OF_STEPS : p->steps;
  for (int64_t first = 0; first < p->steps; first += depth)
    for (int64_t j = b->column; j < b->column_end; j += width) {
      const steps s = {first, at_most(first + depth, p->steps)};
      const block piece = {b->row, b->row_end, j, at_most(j + width, b->column_end)};
      for (int64_t i = b->row, left; (left = b->row_end - i) > 0;) {
        const int64_t rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        chosen[__builtin_ctzll((uint64_t)rows)](p, &piece, s, i, form.key, missing + (i - b->row));
        i += rows;
      }
    }
}

#endif
