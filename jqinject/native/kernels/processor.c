/* The kernels for each kind of processor, and which kind this one is. */
#include "processor.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "few_rows.h"

#if defined(__x86_64__)
#include <cpuid.h>

static const kernel_set AVX512 = {.line = 64,
                                  .float_rows = MOST_FLOAT_ROWS,
                                  .int8 = {int8_rows, int8_tiles},
                                  .int4 = {integer_rows_avx512, int8_tiles},
                                  .groups = {group_tiles_avx512, group_panels},
                                  .floats = {float_rows_avx512, float_tiles_avx512},
                                  .lay_out_bytes = lay_out_bytes_avx512,
                                  .as_they_lie = 1,
                                  .lay_out_floats = lay_out_floats_avx512,
                                  .lay_out_tiles = lay_out_tiles_avx512,
                                  .lay_out_byte_tiles = lay_out_byte_tiles};
static const kernel_set AVX2 = {.line = 32,
                                .block = 1 << 17,
                                .float_rows = BLOCK_ROWS,
                                .gap = ALIGNMENT,
                                .int8 = {integer_rows_avx2, integer_rows_avx2},
                                .int4 = {integer_rows_avx2, integer_rows_avx2},
                                .groups = {group_tiles_avx2, group_tiles_avx2},
                                .floats = {float_rows_avx2, float_tiles_avx2},
                                .lay_out_bytes = lay_out_bytes_avx2,
                                .lay_out_floats = lay_out_floats_avx2,
                                .lay_out_tiles = lay_out_tiles_avx2};
#endif
static const kernel_set FEW = {.line = 64,
                               .float_rows = BLOCK_ROWS,
                               .int8 = {few_rows_of_integers, few_rows_of_integers},
                               .int4 = {few_rows_of_integers, few_rows_of_integers},
                               .groups = {few_rows_of_groups, few_rows_of_groups},
                               .floats = {few_rows_of_floats, few_rows_of_floats}};

/* Those of this processor. Tests set JQINJECT_VECTORS to "few", for what has no vectors, or else for AVX2. */
static const kernel_set* kernels_of_processor(void) {
#if defined(__x86_64__)
  const char* most = getenv("JQINJECT_VECTORS");
  const int dots = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (dots && most == NULL) return &AVX512;
  if (most != NULL && strcmp(most, "few") == 0) return &FEW;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &AVX2 : NULL;
#elif defined(__aarch64__)
  return &FEW;
#else
  return NULL;
#endif
}

const kernel_set* kernels_here(void) {
  static _Atomic(const kernel_set*) known; /* `known` itself for none */
  const kernel_set* found = atomic_load(&known);
  if (found == NULL) {
    found = kernels_of_processor();
    atomic_store(&known, found == NULL ? (const kernel_set*)&known : found);
  }
  return found == (const kernel_set*)&known ? NULL : found;
}

/* 1: AVX-512 VNNI, 2: AMX tiles of int8, 4: kernels for a few rows alone, 8: AVX2. */
EXPORTED int jqinject_cpu_features(void) {
  const kernel_set* here = kernels_here();
  int tiles = 0;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 25 & 1);
  if (here == &AVX512) return 1 | tiles << 1;
  if (here == &AVX2) return 8 | tiles << 1;
#endif
  return (here == &FEW) << 2 | tiles << 1;
}
