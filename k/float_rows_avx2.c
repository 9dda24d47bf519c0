/* float_rows.c for AVX2. */
#define WITH_AVX2
#include "float_rows.c"
