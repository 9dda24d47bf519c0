/* int8 times int8, summed in int32: at most FEW_ROWS rows, with the dot product instruction of AVX-512 VNNI.
 *
 * Nothing is copied: rhs is read once, row by row as it lies, and lhs stays in the first-level cache. A tile is a few
 * rows of lhs times a few of rhs, together 8 or 16 results, whose sums of 16 lanes stay in registers over the whole
 * depth. Here rhs is taken as rhs + 128 (the instruction's unsigned operand), so that 128 * (sum of a row of lhs) is
 * taken off again, once for each row.
 */
#include "vectors.h"

#if defined(__x86_64__)

enum { LARGEST = 8 }; /* rows of a tile */

INLINED void add_line(const int rows, const int columns, __m512i* sums, const int8_t* lhs, const int8_t* rhs,
                      int64_t stride, int64_t left) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  __m512i x[LARGEST];
  UNROLLED(int i = 0; i < rows; i++)
  x[i] = left < LINE ? line_of(lhs + i * stride, left) : _mm512_loadu_si512(lhs + i * stride);
  UNROLLED(int j = 0; j < columns; j++) {
    const int8_t* row = rhs + j * stride;
    const __m512i line = left < LINE ? line_of(row, left) : _mm512_loadu_si512(row);
    const __m512i flipped = _mm512_xor_si512(line, flip);
    UNROLLED(int i = 0; i < rows; i++) ADD_PRODUCTS(sums[j * rows + i], flipped, x[i]);
  }
}

/* A tile at (row, column). Fetches the rows of rhs after these meanwhile. */
INLINED void tile(const int rows, const int columns, const product* p, int64_t row, int64_t column,
                  const int32_t* excess) {
  const int count = rows * columns;
  const int64_t whole = p->depth / LINE * LINE;
  const int8_t *lhs = p->lhs + row * p->depth, *rhs = p->rhs + column * p->depth;
  const char* ahead = (const char*)rhs + columns * p->depth;
  __m512i sums[2 * LARGEST];
  UNROLLED(int n = 0; n < count; n++) sums[n] = _mm512_setzero_si512();
  for (int64_t t = 0; t < whole; t += LINE) {
    UNROLLED(int j = 0; j < columns; j++) _mm_prefetch(ahead + j * p->depth + t, _MM_HINT_T0);
    add_line(rows, columns, sums, lhs + t, rhs + t, p->depth, LINE);
  }
  if (whole < p->depth) add_line(rows, columns, sums, lhs + whole, rhs + whole, p->depth, p->depth - whole);
  int32_t found[2 * LARGEST];
  if (count % 8 == 0) {
    UNROLLED(int n = 0; n < count; n += 8) _mm256_storeu_si256((__m256i*)(found + n), lane_sums(sums + n));
  } else {
    UNROLLED(int n = 0; n < count; n++) found[n] = _mm512_reduce_add_epi32(sums[n]);
  }
  UNROLLED(int j = 0; j < columns; j++)
  UNROLLED(int i = 0; i < rows; i++)
  p->out[(row + i) * p->columns + column + j] =
      (int32_t)((uint32_t)found[j * rows + i] - (uint32_t)excess[i]); /* wraps around */
}

#define ROWS_OF(rows, columns)                                                                            \
  static TARGET __attribute__((noinline)) void rows_##rows(const product* p, const block* b, int64_t row,   \
                                                         const int32_t* excess) {                         \
    int64_t j = b->column;                                                                                \
    for (; j + columns <= b->column_end; j += columns) tile(rows, columns, p, row, j, excess);            \
    for (; j < b->column_end; j++) tile(rows, 1, p, row, j, excess);                                      \
  }
ROWS_OF(1, 8)
ROWS_OF(2, 4)
ROWS_OF(4, 4)
ROWS_OF(8, 2)

/* The columns in pieces whose rhs stays in the first-level cache, if the rows need several tiles. */
TARGET void int8_rows(const product* p, const block* b, uint8_t* scratch) {
  (void)scratch;
  int32_t excess[FEW_ROWS];
  for (int64_t i = b->row; i < b->row_end; i++) 
    excess[i - b->row] = (int32_t)(128u * (uint32_t)row_sum(p->lhs + i * p->depth, p->depth));
  const int64_t width = b->row_end - b->row > LARGEST ? 4 : b->column_end - b->column;
  for (int64_t j = b->column; j < b->column_end; j += width) {
    const block piece = {b->row, b->row_end, j, at_most(j + width, b->column_end)};
    for (int64_t i = b->row, left; (left = b->row_end - i) > 0;) {
      const int64_t rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
      (rows == 8 ? rows_8 : rows == 4 ? rows_4 : rows == 2 ? rows_2 : rows_1)(p, &piece, i, excess + (i - b->row));
      i += rows;
    }
  }
}

#endif
