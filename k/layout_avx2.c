/* layout.c for AVX2. */
#define WITH_AVX2
#include "layout.c"
