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

#endif
#endif
