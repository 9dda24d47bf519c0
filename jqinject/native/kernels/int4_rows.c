/* int8 times numbers in 4 bits, summed in int32: at most FEW_ROWS rows, with the dot product instruction of AVX-512 VNNI.
 *
 * As int8_rows.c, but 64 bytes of rhs are 128 indices, which become bytes in registers: differences from the least number
 * of the table, which are the instruction's unsigned operand (see avx512.h). What that takes off is
 * put on again: the least number times the sum of the row of lhs. lhs is laid out as the halves of a byte are: the
 * numbers at even places, then those at odd ones (see layout.c).
 */
#include "avx512.h"

#if defined(__x86_64__)

enum { LARGEST = 8, MOST_COLUMNS = 8 }; /* of a tile */

INLINED void tile(const unsigned_kind kind, const int rows, const int columns, const product* p, int64_t row,
                  int64_t column, __m512i key, const int32_t* missing) {
  const int count = rows * columns;
  const int64_t bytes = (p->depth + 1) / 2, stride = p->steps * 2 * LINE;
  const int8_t* x = (const int8_t*)p->laid_out + row * stride;
  const uint8_t* rhs = (const uint8_t*)p->rhs + column * p->rhs_stride;
  __m512i sums[2 * LARGEST];
  UNROLLED(int n = 0; n < count; n++) sums[n] = _mm512_setzero_si512();
  for (int64_t start = 0; start < bytes; start += LINE, x += 2 * LINE) {
    __m512i w[MOST_COLUMNS][2];
    UNROLLED(int j = 0; j < columns; j++) {
      const uint8_t* line = rhs + j * p->rhs_stride;
      _mm_prefetch((const char*)line + columns * p->rhs_stride + start, _MM_HINT_T0);
      unsigned_lines(kind, key, packed_line(line, start, bytes), w[j]);
      if (rows > 1) continue;
      ADD_PRODUCTS(sums[j], w[j][0], _mm512_load_si512(x));
      ADD_PRODUCTS(sums[j], w[j][1], _mm512_load_si512(x + LINE));
    }
    if (rows > 1) UNROLLED(int i = 0; i < rows; i++) {
      const __m512i first = _mm512_load_si512(x + i * stride), second = _mm512_load_si512(x + i * stride + LINE);
      UNROLLED(int j = 0; j < columns; j++) {
        ADD_PRODUCTS(sums[j * rows + i], w[j][0], first);
        ADD_PRODUCTS(sums[j * rows + i], w[j][1], second);
      }
    }
  }
  int32_t found[2 * LARGEST];
  if (count % 8 == 0) {
    UNROLLED(int n = 0; n < count; n += 8) _mm256_storeu_si256((__m256i*)(found + n), lane_sums(sums + n));
  } else {
    UNROLLED(int n = 0; n < count; n++) found[n] = _mm512_reduce_add_epi32(sums[n]);
  }
  UNROLLED(int j = 0; j < columns; j++)
  UNROLLED(int i = 0; i < rows; i++)
  p->out[(row + i) * p->columns + column + j] = (int32_t)((uint32_t)found[j * rows + i] + (uint32_t)missing[i]);
}

typedef void tiles(const product* p, const block* b, int64_t row, __m512i key, const int32_t* missing);

#define ROWS_OF(kind, rows, columns)                                                                                   \
  static VNNI __attribute__((noinline)) void kind##_##rows(const product* p, const block* b, int64_t row, __m512i key, \
                                                           const int32_t* missing) {                                   \
    int64_t j = b->column;                                                                                             \
    for (; j + columns <= b->column_end; j += columns) tile(kind, rows, columns, p, row, j, key, missing);             \
    for (; j < b->column_end; j++) tile(kind, rows, 1, p, row, j, key, missing);                                       \
  }
#define ALL_ROWS(kind) ROWS_OF(kind, 1, 8) ROWS_OF(kind, 2, 4) ROWS_OF(kind, 4, 4) ROWS_OF(kind, 8, 2)
ALL_ROWS(TURNED)
ALL_ROWS(BY_TABLE)

/* The columns in pieces whose rhs stays in the first-level cache, if the rows need several tiles. */
VNNI void int4_rows(const product* p, const block* b, uint8_t* scratch) {
  (void)scratch;
  static tiles* const choices[2][4] = {{TURNED_1, TURNED_2, TURNED_4, TURNED_8},
                                       {BY_TABLE_1, BY_TABLE_2, BY_TABLE_4, BY_TABLE_8}};
  const unsigned_form form = unsigned_form_of(p);
  tiles* const* chosen = choices[form.kind == BY_TABLE];
  int32_t missing[FEW_ROWS];
  for (int64_t i = b->row; i < b->row_end; i++)
    missing[i - b->row] = (int32_t)((uint32_t)least_of(p) * (uint32_t)row_sum(p->lhs + i * p->depth, p->depth));
  const int64_t width = b->row_end - b->row > LARGEST ? 8 : b->column_end - b->column;
  for (int64_t j = b->column; j < b->column_end; j += width) {
    const block piece = {b->row, b->row_end, j, at_most(j + width, b->column_end)};
    for (int64_t i = b->row, left; (left = b->row_end - i) > 0;) {
      const int64_t rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
      chosen[__builtin_ctzll((uint64_t)rows)](p, &piece, i, form.key, missing + (i - b->row));
      i += rows;
    }
  }
}

#endif
