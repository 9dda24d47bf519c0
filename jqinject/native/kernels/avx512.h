/* What the kernels for AVX-512 VNNI share. */
#ifndef JQINJECT_AVX512_H
#define JQINJECT_AVX512_H

#include "product.h"
#include "stripes.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define INLINED static inline __attribute__((always_inline)) VNNI
#define UNROLLED _Pragma("GCC unroll 16") for

/* sums += bytes * signed_bytes, four products in each lane. The intrinsic makes GCC copy the sums at every step; the
 * instruction does not. */
#define ADD_PRODUCTS(sums, bytes, signed_bytes) \
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(signed_bytes))

/* 16 rows of 16 words become columns: pairs, then fours of neighbouring rows within quarters, then quarters. */
INLINED void turn(__m512* v) {
  __m512 w[16];
  UNROLLED(int n = 0; n < 16; n += 2) {
    w[n] = _mm512_unpacklo_ps(v[n], v[n + 1]);
    w[n + 1] = _mm512_unpackhi_ps(v[n], v[n + 1]);
  }
  UNROLLED(int n = 0; n < 16; n += 4) UNROLLED(int half = 0; half < 2; half++) {
    const __m512d a = _mm512_castps_pd(w[n + half]), b = _mm512_castps_pd(w[n + half + 2]);
    v[n + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    v[n + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  UNROLLED(int n = 0; n < 4; n++) {
    const __m512 even = _mm512_shuffle_f32x4(v[n], v[n + 4], 0x88), odd = _mm512_shuffle_f32x4(v[n], v[n + 4], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(v[n + 8], v[n + 12], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4(v[n + 8], v[n + 12], 0xdd);
    w[n] = _mm512_shuffle_f32x4(even, even2, 0x88), w[n + 8] = _mm512_shuffle_f32x4(even, even2, 0xdd);
    w[n + 4] = _mm512_shuffle_f32x4(odd, odd2, 0x88), w[n + 12] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
  }
  UNROLLED(int n = 0; n < 16; n++) v[n] = w[n];
}

/* The 64 bytes of a line, zero after `left` of them. */
INLINED __m512i line_of(const void* from, int64_t left) {
  return _mm512_maskz_loadu_epi8(left < LINE ? ~0ull >> (LINE - left) : ~0ull, from);
}

/* The sum of a row of bytes. */
INLINED int32_t row_sum(const int8_t* row, int64_t depth) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t t = 0; t < depth; t += LINE) ADD_PRODUCTS(sum, ones, line_of(row + t, depth - t));
  return _mm512_reduce_add_epi32(sum);
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

/* The same of floats. */
INLINED __m256 float_lane_sums(const __m512* v) {
  __m512 pairs[4];
  __m256 halves[2];
  UNROLLED(int i = 0; i < 4; i++)
  pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  UNROLLED(int i = 0; i < 2; i++) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    const __m512 fours = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                       _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    halves[i] = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(halves[0], halves[1], 0x20),
                       _mm256_permute2f128_ps(halves[0], halves[1], 0x31));
}

/* 128 numbers in 4 bits, as indices: those at even places, and those at odd ones. With `flip`, its bits of each are
 * turned. */
INLINED void split_halves(__m512i packed, __m512i flip, __m512i* even, __m512i* odd) {
  const __m512i low = _mm512_set1_epi8(0x0f);
  const int flipped_and = 0x28; /* (a ^ b) & c */
  *even = _mm512_ternarylogic_epi32(packed, flip, low, flipped_and);
  *odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(packed, 4), flip, low, flipped_and);
}

/* A table of 16 bytes in each quarter. */
INLINED __m512i table_of(const int8_t* table) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
}

/* The line of rhs that begins at byte `start` of a row with `bytes` bytes. */
INLINED __m512i packed_line(const uint8_t* row, int64_t start, int64_t bytes) {
  return start + LINE <= bytes ? _mm512_loadu_si512(row + start) : line_of(row + start, bytes - start);
}

/* How a line of rhs becomes the instruction's unsigned operand: its numbers less the least of them. Integers in 4 bits
 * need no table, as their order differs from that of their indices by some bits that are turned. */
typedef enum { BYTES, TURNED, BY_TABLE } unsigned_kind;

typedef struct {
  unsigned_kind kind;
  __m512i key; /* the bits, or the table */
} unsigned_form;

INLINED unsigned_form unsigned_form_of(const product* p) {
  if (!p->four_bits) return (unsigned_form){BYTES, _mm512_set1_epi8((char)0x80)};
  const int8_t least = least_of(p);
  int8_t differences[16];
  int turned = 1;
  for (int n = 0; n < 16; n++) {
    differences[n] = (int8_t)(p->table[n] - least);
    turned &= differences[n] == (n ^ differences[0]);
  }
  return turned ? (unsigned_form){TURNED, _mm512_set1_epi8(differences[0])}
                : (unsigned_form){BY_TABLE, table_of(differences)};
}

/* One line of bytes, or two of numbers in 4 bits. */
INLINED void unsigned_lines(const unsigned_kind kind, __m512i key, __m512i packed, __m512i* lines) {
  if (kind == BYTES) {
    lines[0] = _mm512_xor_si512(packed, key);
    return;
  }
  split_halves(packed, kind == TURNED ? key : _mm512_setzero_si512(), &lines[0], &lines[1]);
  if (kind == BY_TABLE) lines[0] = _mm512_shuffle_epi8(key, lines[0]), lines[1] = _mm512_shuffle_epi8(key, lines[1]);
}

/* Where the groups of a step are, as steps go by; divisions would take as long as the products. */
typedef struct {
  int64_t first;
  uint32_t left; /* steps of a group that fills several */
} group_place;

INLINED group_place group_of_step(const product* p, int64_t step) {
  if (p->groups_a_step) return (group_place){step * p->groups_a_step, 0};
  return (group_place){step / p->steps_a_group, p->steps_a_group - (uint32_t)(step % p->steps_a_group)};
}

INLINED group_place first_group(const product* p) { return group_of_step(p, 0); }

INLINED group_place next_group(const product* p, group_place at) {
  if (p->groups_a_step) return (group_place){at.first + p->groups_a_step, 0};
  return at.left > 1 ? (group_place){at.first, at.left - 1} : (group_place){at.first + 1, p->steps_a_group};
}

/* The group of each lane of a step that has several, counted from the step's first. */
INLINED __m512i groups_of_lanes(const product* p) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_srl_epi32(lanes, _mm_cvtsi32_si128((int)p->lanes_shift));
}

/* The numbers of a column's groups, one for each lane of a step whose first group is `first`. */
INLINED __m512 of_lanes(const int whole_steps, group_numbers n, int64_t column, int64_t first, __m512i places) {
  if (whole_steps) return _mm512_set1_ps(n.first[first * STRIPE + column]);
  return _mm512_permutexvar_ps(places, _mm512_loadu_ps(n.first + column * n.column + first));
}

/* The group of vector n, of 16 numbers, of a step of bytes. */
INLINED int64_t group_of_vector(const product* p, int64_t first, int n) {
  return p->groups_a_step == 0 ? first : first + (4 * n >> p->lanes_shift);
}

#endif
#endif
