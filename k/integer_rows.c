/* int8 times numbers in 4 bits, summed in int32; with AVX2 int8 times int8 as well.
 *
 * rhs is read once, row by row as it lies. A line of it in 4 bits are twice as many indices as bytes, which become bytes
 * in registers: differences from the least number of the table, an instruction's unsigned operand (see unsigned_lines,
 * also for int8). What that takes off is put on again: the least number times the sum of the row of lhs. lhs is laid out
 * as the halves of a byte are: the numbers at even places, then those at odd ones (see layout.c), and stays in the
 * first-level cache. A tile is a few rows times a few columns, whose sums stay in registers over the whole depth.
 */
#include "vectors.h"

#if defined(__x86_64__)

enum { LARGEST = 8, MOST_COLUMNS = 8 }; /* of a tile */

/* Steps of the depth; all but the first ones are added to those before. */
typedef struct {
  int64_t first, end;
} steps;

INLINED void tile(const unsigned_kind kind, const int rows, const int columns, const product* p, steps s, int64_t row,
                  int64_t column, ivec key, const int32_t* missing, const uint8_t* copies, const block* b) {
  const int count = rows * columns;
  const int64_t span = LINES(kind) * LINE, stride = p->laid_out_stride;
  const int8_t* x = (const int8_t*)p->laid_out + row * stride + s.first * span;
  ivec sums[2 * LARGEST];
  UNROLLED(int n = 0; n < count; n++) sums[n] = no_integers();
  for (int64_t start = s.first * LINE; start < s.end * LINE;) {
    const run_of_lines rhs = lines_from(p, copies, b, column, start);
    const int64_t end = at_most(rhs.end, s.end * LINE);
    for (; start < end; start += LINE, x += span) {
      ivec w[MOST_COLUMNS][2];
      UNROLLED(int j = 0; j < columns; j++) {
        const uint8_t* line = rhs.first + j * rhs.stride + start;
        _mm_prefetch((const char*)line + columns * rhs.stride, _MM_HINT_T0);
        unsigned_lines(kind, key, loadu_line(line), w[j]);
        if (rows > 1 && HOLDS_LINES) continue;
        UNROLLED(int i = 0; i < rows; i++)
        sums[j * rows + i] = with_products(kind, sums[j * rows + i], w[j], x + i * stride);
      }
      if (rows > 1 && HOLDS_LINES)
        UNROLLED(int i = 0; i < rows; i++)
        UNROLLED(int j = 0; j < columns; j++)
        sums[j * rows + i] = with_products(kind, sums[j * rows + i], w[j], x + i * stride);
    }
  }
  int32_t found[2 * LARGEST];
  totals(sums, count, found);
  UNROLLED(int j = 0; j < columns; j++) UNROLLED(int i = 0; i < rows; i++) {
    int32_t* out = p->out + (row + i) * p->columns + column + j;
    const uint32_t before = (uint32_t)(s.first == 0 ? missing[i] : *out);
    *out = (int32_t)((uint32_t)found[j * rows + i] + before); /* wraps around */
  }
}

/* Some rows of columns [column, end) of a block. */
typedef void tiles(const product* p, const block* b, steps s, int64_t row, int64_t column, int64_t end, ivec key,
                   const int32_t* missing, const uint8_t* copies);

#define ROWS_OF(kind, rows, columns)                                                                               \
  static TARGET __attribute__((noinline)) void kind##_##rows(const product* p, const block* b, steps s, int64_t row, \
                                                             int64_t column, int64_t end, ivec key,                \
                                                             const int32_t* missing, const uint8_t* copies) {      \
    int64_t j = column;                                                                                            \
    for (; j + columns <= end; j += columns) tile(kind, rows, columns, p, s, row, j, key, missing, copies, b);     \
    for (; j < end; j++) tile(kind, rows, 1, p, s, row, j, key, missing, copies, b);                               \
  }
KINDS(INTEGER_TILES)
#define CHOICES(kind) {kind##_1, kind##_2, kind##_4, kind##_8},

static inline int64_t rows_of_tile(int64_t left) { return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* If the rows need several tiles, the depth in pieces of which a tile's lhs stays in the first-level cache, and the columns
 * in pieces whose rhs does. */
TARGET void NAMED(integer_rows)(const product* p, const block* b, uint8_t* scratch) {
  copy_last_lines(p, b, scratch);
  static tiles* const choices[][4] = {KINDS(CHOICES)};
  const unsigned_form form = unsigned_form_of(p);
  int32_t missing[BLOCK_ROWS];
  unsigned_kind kinds[BLOCK_ROWS]; /* of a tile, at its first row */
  for (int64_t i = b->row, rows; i < b->row_end; i += rows) {
    rows = rows_of_tile(b->row_end - i);
    kinds[i - b->row] = kind_for(form.kind, p->lhs + i * p->depth, rows * p->depth);
    for (int64_t n = i; n < i + rows; n++)
      missing[n - b->row] =
          form.least == 0 ? 0 : (int32_t)((uint32_t)form.least * (uint32_t)row_sum(p->lhs + n * p->depth, p->depth));
  }
  const int64_t span = (p->four_bits ? 2 : 1) * LINE;
  const int several = b->row_end - b->row > LARGEST;
  const int64_t width = several ? 8 : b->column_end - b->column, depth = several ? PIECE_OF_ROW / span : p->steps;
  for (int64_t first = 0; first < p->steps; first += depth)
    for (int64_t j = b->column; j < b->column_end; j += width) {
      const steps s = {first, at_most(first + depth, p->steps)};
      const int64_t end = at_most(j + width, b->column_end);
      for (int64_t i = b->row, rows; i < b->row_end; i += rows) {
        rows = rows_of_tile(b->row_end - i);
        tiles* const chosen = choices[kinds[i - b->row]][__builtin_ctzll((uint64_t)rows)];
        chosen(p, b, s, i, j, end, form.key, missing + (i - b->row), scratch);
      }
    }
}

#endif
