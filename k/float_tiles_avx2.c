/* float_tiles.c for AVX2. */
#define WITH_AVX2
#include "float_tiles.c"
