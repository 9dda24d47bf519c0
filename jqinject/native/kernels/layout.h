/* Rows of lhs laid out for a call; see layout.c. */
#ifndef JQINJECT_LAYOUT_H
#define JQINJECT_LAYOUT_H

#include "product.h"

/* Where the sums of the lanes of bytes go, if anywhere, and the same times `least`, the least number of rhs. */
typedef struct {
  float* sums; /* NULL for none */
  int32_t* offsets;
  int32_t least;
} byte_sums;

/* `sums` may be NULL. */
HIDDEN void lay_out_floats(const float* from, int64_t rows, int64_t depth, int four_bits, float* to, float* sums);
/* In tiles, the depth padded with zeros; `to` holds whole tiles. */
HIDDEN void lay_out_tiles(const float* from, int64_t rows, int64_t depth, int64_t padded, float* to);
HIDDEN void lay_out_bytes(const int8_t* from, int64_t rows, int64_t depth, int four_bits, int8_t* to, byte_sums found);
/* A scale for each lane of each step. */
HIDDEN void lay_out_scales(const float* from, int64_t rows, int64_t groups, int64_t group, int64_t steps, int size,
                           float* to);

#endif
