/* Which kernels a processor has; see processor.c. */
#ifndef JQINJECT_PROCESSOR_H
#define JQINJECT_PROCESSOR_H

#include "layout.h"
#include "product.h"

/* The kernels for the vectors of a processor: of each kind of product, for a few rows and for more. */
typedef struct {
  int64_t line;  /* bytes of a vector */
  int64_t block; /* bytes of integers of lhs in a block, which the second-level cache holds; 0 if BLOCK_ROWS rows fit */
  int64_t float_rows; /* the most rows of floats in a block: taller ones unpack rhs less often */
  int64_t gap;   /* bytes after a row of integers: rows of a tile a power of 2 apart would share few places of a cache */
  kernel *int8[2], *int4[2], *groups[2], *floats[2];
  byte_layout* lay_out_bytes; /* NULL if nothing is laid out */
  int as_they_lie;            /* whether int8 beside int8 is not */
  float_layout* lay_out_floats;
  tile_layout* lay_out_tiles;
  byte_tile_layout* lay_out_byte_tiles; /* NULL without tiles of bytes */
} kernel_set;

/* Those of this processor; NULL if it has none. */
HIDDEN const kernel_set* kernels_here(void);

#endif
