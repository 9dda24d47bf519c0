/* Vectors of AVX-512 VNNI; see vectors.h. */
#ifndef JQINJECT_AVX512_H
#define JQINJECT_AVX512_H

#include "product.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define INLINED static inline __attribute__((always_inline)) TARGET
#define UNROLLED _Pragma("GCC unroll 16") for
#define NAMED(name) name##_avx512
#define V(name) _mm512_##name

enum { LINE = 64, LANES = 16 };
typedef __m512i ivec;
typedef __m512 fvec;

INLINED ivec load_line(const void* from) { return _mm512_load_si512(from); }
INLINED ivec loadu_line(const void* from) { return _mm512_loadu_si512(from); }
INLINED void store_line(void* to, ivec v) { _mm512_store_si512(to, v); }
INLINED ivec no_integers(void) { return _mm512_setzero_si512(); }
INLINED ivec as_integers(fvec v) { return _mm512_castps_si512(v); }
INLINED fvec as_floats(ivec v) { return _mm512_castsi512_ps(v); }
INLINED float total(fvec v) { return _mm512_reduce_add_ps(v); }

/* Of all lanes, the first ones. */
typedef __mmask16 lane_mask;
INLINED lane_mask first_lanes(int64_t count) { return (lane_mask)((1 << count) - 1); }
INLINED fvec load_first(lane_mask kept, const float* from) { return _mm512_maskz_loadu_ps(kept, from); }
INLINED fvec only_first(lane_mask kept, fvec v) { return _mm512_maskz_mov_ps(kept, v); }

/* The first `count` of LANES bytes, then zeros. */
INLINED __m128i first_bytes(const void* from, int64_t count) {
  return _mm_maskz_loadu_epi8((__mmask16)(count >= 16 ? 0xffff : (1 << count) - 1), from);
}
INLINED ivec widened(__m128i bytes) { return _mm512_cvtepu8_epi32(bytes); }
INLINED ivec widened_signed(__m128i bytes) { return _mm512_cvtepi8_epi32(bytes); }

/* Numbers LANES * n, ... of a line of bytes, read again: it ends `left` bytes from its start. */
enum { BYTES_FROM_LINE = 0 };
INLINED fvec bytes_as_floats(ivec line, const uint8_t* from, int64_t left, int n) {
  (void)line;
  const int64_t rest = left - 16 * n;
  const __mmask16 kept = rest >= 16 ? 0xffff : rest <= 0 ? 0 : (__mmask16)(0xffff >> (16 - rest));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(kept, from + 16 * n)));
}

/* 16 floats, and those of them that the 8 halves of bytes of each word name: the n-th one of all words in vector n. */
typedef fvec float_table;
INLINED float_table float_table_of(const float* from) { return _mm512_loadu_ps(from); }
INLINED void looked_up(float_table table, ivec words, fvec* found) {
  UNROLLED(int n = 0; n < 8; n++) found[n] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * n), table);
}

INLINED fvec permuted(fvec v, ivec places) { return _mm512_permutexvar_ps(places, v); }
INLINED ivec lane_numbers(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

/* `then` where a is equal to b, or less. */
INLINED fvec if_equal(ivec a, ivec b, fvec then, fvec otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmpeq_epi32_mask(a, b), then);
}
INLINED fvec if_less(ivec a, ivec b, fvec then, fvec otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmplt_epi32_mask(a, b), then);
}

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

/* The sums over the lanes of each of `count` vectors. */
INLINED void totals(const __m512i* sums, const int count, int32_t* found) {
  if (count % 8 == 0) {
    UNROLLED(int n = 0; n < count; n += 8) _mm256_storeu_si256((__m256i*)(found + n), lane_sums(sums + n));
  } else {
    UNROLLED(int n = 0; n < count; n++) found[n] = _mm512_reduce_add_epi32(sums[n]);
  }
}

/* 128 numbers in 4 bits, as indices: those at even places, and those at odd ones. With `flip`, its bits of each are
 * turned. */
INLINED void split_halves(__m512i packed, __m512i flip, __m512i* even, __m512i* odd) {
  const __m512i low = _mm512_set1_epi8(0x0f);
  enum { FLIPPED_AND = 0x28 }; /* (a ^ b) & c */
  *even = _mm512_ternarylogic_epi32(packed, flip, low, FLIPPED_AND);
  *odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(packed, 4), flip, low, FLIPPED_AND);
}

/* A table of 16 bytes in each quarter. */
INLINED __m512i table_of(const int8_t* table) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
}

/* How a line of rhs becomes the instruction's unsigned operand: its numbers less the least of them. Integers in 4 bits
 * need no table, as their order differs from that of their indices by some bits that are turned. */
typedef enum { BYTES, TURNED, BY_TABLE } unsigned_kind;
#define KINDS(of) of(BYTES) of(TURNED) of(BY_TABLE)

typedef struct {
  unsigned_kind kind;
  int8_t least;
  __m512i key; /* the bits, or the table */
} unsigned_form;

INLINED unsigned_form unsigned_form_of(const product* p) {
  if (!p->four_bits) return (unsigned_form){BYTES, -128, _mm512_set1_epi8((char)0x80)};
  const int8_t least = least_of_table(p->table);
  int8_t differences[16];
  int turned = 1;
  for (int n = 0; n < 16; n++) {
    differences[n] = (int8_t)(p->table[n] - least);
    turned &= differences[n] == (n ^ differences[0]);
  }
  return turned ? (unsigned_form){TURNED, least, _mm512_set1_epi8(differences[0])}
                : (unsigned_form){BY_TABLE, least, table_of(differences)};
}

/* What multiplies some rows of lhs: any. */
INLINED unsigned_kind kind_for(unsigned_kind kind, const int8_t* lhs, int64_t depth) {
  (void)lhs, (void)depth;
  return kind;
}

/* One line of bytes, or two of numbers in 4 bits. */
#define LINES(kind) ((kind) == BYTES ? 1 : 2)
INLINED void unsigned_lines(const unsigned_kind kind, __m512i key, __m512i packed, __m512i* lines) {
  if (kind == BYTES) {
    lines[0] = _mm512_xor_si512(packed, key);
    return;
  }
  split_halves(packed, kind == TURNED ? key : _mm512_setzero_si512(), &lines[0], &lines[1]);
  if (kind == BY_TABLE) lines[0] = _mm512_shuffle_epi8(key, lines[0]), lines[1] = _mm512_shuffle_epi8(key, lines[1]);
}

/* sums += lines * what of lhs lies at x, as it was laid out. */
INLINED __m512i with_products(const unsigned_kind kind, __m512i sums, const __m512i* lines, const int8_t* x) {
  ADD_PRODUCTS(sums, lines[0], _mm512_load_si512(x));
  if (LINES(kind) == 2) ADD_PRODUCTS(sums, lines[1], _mm512_load_si512(x + LINE));
  return sums;
}

/* How lhs is laid out beside numbers in 4 bits: the even bytes of two lines that follow each other, then the odd ones. */
INLINED void byte_pairs(__m512i* lines) {
  const __m512i low = _mm512_set1_epi16(0xff), quarters = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i even = _mm512_packus_epi16(_mm512_and_si512(lines[0], low), _mm512_and_si512(lines[1], low));
  const __m512i odd = _mm512_packus_epi16(_mm512_srli_epi16(lines[0], 8), _mm512_srli_epi16(lines[1], 8));
  lines[0] = _mm512_permutexvar_epi64(quarters, even);
  lines[1] = _mm512_permutexvar_epi64(quarters, odd);
}

/* The sums of the lanes of what was laid out at x, beside numbers in 4 bits or bytes. */
#define OF_FOUR_BITS TURNED
INLINED __m512i sum_of_lanes(const unsigned_kind kind, const int8_t* x) {
  const __m512i ones[2] = {_mm512_set1_epi8(1), _mm512_set1_epi8(1)};
  return with_products(kind, _mm512_setzero_si512(), ones, x);
}

/* Rows and columns of tiles whose sums stay in registers: of integers; whether the lines of all
 * columns fit beside them; and how many bytes of each of 8 rows of lhs stay in the first-level cache. */
#define INTEGER_TILES(kind) ROWS_OF(kind, 1, 8) ROWS_OF(kind, 2, 4) ROWS_OF(kind, 4, 4) ROWS_OF(kind, 8, 2)
enum { PIECE_OF_ROW = 1 << 30, HOLDS_LINES = 1 };
/* The columns of a tile of a few rows of floats. */
#define FLOAT_COLUMNS(rows) 2
/* The heights of tiles of floats, the one for so many rows that are left, and the depth that stays in the first-level
 * cache. */
enum { FLOAT_DEPTH = 256 };
#define DEPTH_LOOP for
#define FLOAT_TILES(of) of(4) of(8) of(12)
static inline int64_t tile_height(int64_t left) { return left > 8 ? 12 : left > 4 ? 8 : 4; }
/* The height of the tile of bytes for so many rows that are left. */
static inline int64_t byte_tile_height(int64_t left) { return left > 4 ? 6 : left > 2 ? 4 : 2; }

#endif
#endif
