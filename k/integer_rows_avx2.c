/* integer_rows.c for AVX2. */
#define WITH_AVX2
#include "integer_rows.c"
