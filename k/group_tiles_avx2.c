/* group_tiles.c for AVX2. */
#define WITH_AVX2
#include "group_tiles.c"
