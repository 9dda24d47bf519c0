/* What the kernels for AVX-512 VNNI share. */
#ifndef JQINJECT_AVX512_H
#define JQINJECT_AVX512_H

#include <immintrin.h>

#include "product.h"

#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define INLINED static inline __attribute__((always_inline)) VNNI
#define UNROLLED _Pragma("GCC unroll 16") for

/* sums += bytes * signed_bytes, four products in each lane. The intrinsic makes GCC copy the sums at every step; the
 * instruction does not. */
#define ADD_PRODUCTS(sums, bytes, signed_bytes) \
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(signed_bytes))

/* The 64 bytes of a line, zero after `left` of them. */
INLINED __m512i line_of(const void* from, int64_t left) {
  return _mm512_maskz_loadu_epi8(left < LINE ? ~0ull >> (LINE - left) : ~0ull, from);
}

/* The sums over the lanes of 8 vectors, in one. */
INLINED __m256i lane_sums(const __m512i* v) {
  __m512i pairs[4], fours;
  __m256i halves[2];
  UNROLLED(int i = 0; i < 4; i++)
  pairs[i] =
      _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  UNROLLED(int i = 0; i < 2; i++) {
    fours = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                             _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    halves[i] = _mm256_add_epi32(_mm512_castsi512_si256(fours), _mm512_extracti64x4_epi64(fours, 1));
  }
  return _mm256_add_epi32(_mm256_permute2x128_si256(halves[0], halves[1], 0x20),
                          _mm256_permute2x128_si256(halves[0], halves[1], 0x31));
}

#endif
