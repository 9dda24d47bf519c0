/* Rows of lhs laid out for a call; see layout.c. */
#ifndef JQINJECT_LAYOUT_H
#define JQINJECT_LAYOUT_H

#include "product.h"

/* Where the sums of the lanes of bytes go, if anywhere, and the same times the least number of rhs. */
typedef struct {
  float* sums; /* NULL for none */
  int32_t* offsets;
} byte_sums;

/* `sums` may be NULL. */
typedef void float_layout(const float* from, int64_t rows, int64_t depth, int four_bits, float* to, float* sums);
/* In tiles, the depth padded with zeros; `to` holds whole tiles. */
typedef void tile_layout(const float* from, int64_t rows, int64_t depth, int64_t padded, float* to);
/* Beside the rhs of a product. */
typedef void byte_layout(const product* p, const int8_t* from, int64_t rows, int8_t* to, byte_sums found);

/* Beside the rhs of a product, in tiles. For each piece of the depth a row has a sum and an offset, and a scale where
 * `scales` has one for each group; those of a tile's rows lie side by side. */
typedef struct {
  float *sums, *scales;
  int32_t* offsets;
} piece_numbers;
typedef void byte_tile_layout(const product* p, const int8_t* from, int64_t rows, const float* scales, int8_t* to,
                              piece_numbers found);

/* How many numbers a piece has, and how many vectors of four of each column or row. */
static inline int64_t numbers_of_piece(const product* p, int64_t piece) {
  const int64_t size = p->groups > 1 ? p->group : p->depth;
  return at_most(size - piece % p->pieces_a_group * p->piece, p->piece);
}
static inline int64_t vectors_of_piece(const product* p, int64_t piece) {
  const int64_t numbers = numbers_of_piece(p, piece);
  return p->four_bits ? parts(numbers, 8) * 2 : parts(numbers, 4);
}

HIDDEN float_layout lay_out_floats_avx512, lay_out_floats_avx2;
HIDDEN tile_layout lay_out_tiles_avx512, lay_out_tiles_avx2;
HIDDEN byte_layout lay_out_bytes_avx512, lay_out_bytes_avx2;
HIDDEN byte_tile_layout lay_out_byte_tiles;

#endif
