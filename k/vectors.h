/* Vectors of the instruction set that a file is compiled for, under names that both sets have.
 *
 * The same source serves AVX-512 and AVX2: `NAME_avx2.c` includes `NAME.c`, with WITH_AVX2 defined. LINE and LANES are the
 * bytes and the 32-bit lanes of a vector; V(add_ps) is the intrinsic of that name, NAMED(tiles) the function's.
 */
#ifndef JQINJECT_VECTORS_H
#define JQINJECT_VECTORS_H

#include "product.h"

#ifdef WITH_AVX2
#include "avx2.h"
#else
#include "avx512.h"
#endif

#if defined(__x86_64__)

/* The line of rhs that begins at byte `start` of a row with `bytes` bytes. */
INLINED ivec packed_line(const uint8_t* row, int64_t start, int64_t bytes) {
  return start + LINE <= bytes ? loadu_line(row + start) : line_of(row + start, bytes - start);
}

/* Bytes [start, end) of a row of rhs lie at first + start, those of the next row `stride` further on. */
typedef struct {
  const uint8_t* first;
  int64_t stride, end;
} run_of_lines;

static inline int64_t row_bytes(const product* p) { return p->four_bits ? (p->depth + 1) / 2 : p->depth; }

/* From byte `start` of a row of rhs on: whole lines where they lie, then the last one, which is not whole, in copies with
 * zeros behind. A loop over a run has no branch for the last line, which would take registers from its sums. */
static inline run_of_lines lines_from(const product* p, const uint8_t* copies, const block* b, int64_t column,
                                      int64_t start) {
  const int64_t whole = row_bytes(p) / LINE * LINE;
  if (start < whole) return (run_of_lines){(const uint8_t*)p->rhs + column * p->rhs_stride, p->rhs_stride, whole};
  return (run_of_lines){copies + (column - b->column) * LINE - whole, LINE, whole + LINE};
}

/* These copies, of the columns of a block. */
static TARGET inline void copy_last_lines(const product* p, const block* b, uint8_t* to) {
  const int64_t bytes = row_bytes(p), whole = bytes / LINE * LINE;
  for (int64_t j = b->column; whole < bytes && j < b->column_end; j++, to += LINE)
    store_line(to, line_of((const uint8_t*)p->rhs + j * p->rhs_stride + whole, bytes - whole));
}

#endif
#endif
