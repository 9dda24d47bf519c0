/* Vectors of AVX2; see vectors.h. */
#ifndef JQINJECT_AVX2_H
#define JQINJECT_AVX2_H

#include <string.h>

#include "product.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define INLINED static inline __attribute__((always_inline)) TARGET
#define UNROLLED _Pragma("GCC unroll 16") for
#define NAMED(name) name##_avx2
#define V(name) _mm256_##name

enum { LINE = 32, LANES = 8 };
typedef __m256i ivec;
typedef __m256 fvec;

INLINED ivec load_line(const void* from) { return _mm256_load_si256(from); }
INLINED ivec loadu_line(const void* from) { return _mm256_loadu_si256(from); }
INLINED void store_line(void* to, ivec v) { _mm256_store_si256(to, v); }
INLINED ivec no_integers(void) { return _mm256_setzero_si256(); }
INLINED ivec as_integers(fvec v) { return _mm256_castps_si256(v); }
INLINED fvec as_floats(ivec v) { return _mm256_castsi256_ps(v); }

INLINED float total(fvec v) {
  const __m128 fours = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pairs = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
}

INLINED ivec lane_numbers(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINED fvec permuted(fvec v, ivec places) { return _mm256_permutevar8x32_ps(v, places); }

/* Of all lanes, the first ones. */
typedef __m256i lane_mask;
INLINED lane_mask first_lanes(int64_t count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane_numbers()); }
INLINED fvec load_first(lane_mask kept, const float* from) { return _mm256_maskload_ps(from, kept); }
INLINED fvec only_first(lane_mask kept, fvec v) { return _mm256_and_ps(as_floats(kept), v); }

/* The bytes of a line, zero after `left` of them. */
INLINED ivec line_of(const void* from, int64_t left) {
  if (left >= LINE) return loadu_line(from);
  uint8_t line[LINE] = {0};
  memcpy(line, from, (size_t)left);
  return loadu_line(line);
}

/* The first `count` of LANES bytes, then zeros. */
INLINED __m128i first_bytes(const void* from, int64_t count) {
  int64_t bytes = 0;
  memcpy(&bytes, from, (size_t)at_most(count, LANES));
  return _mm_cvtsi64_si128(bytes);
}
INLINED ivec widened(__m128i bytes) { return _mm256_cvtepu8_epi32(bytes); }
INLINED ivec widened_signed(__m128i bytes) { return _mm256_cvtepi8_epi32(bytes); }

/* Numbers LANES * n, ... of a line of bytes. */
enum { BYTES_FROM_LINE = 1 };
INLINED fvec bytes_as_floats(ivec line, const uint8_t* from, int64_t left, int n) {
  (void)from, (void)left;
  const __m128i half = n < 2 ? _mm256_castsi256_si128(line) : _mm256_extracti128_si256(line, 1);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(n % 2 ? _mm_unpackhi_epi64(half, half) : half));
}

/* 16 floats, byte by byte, and those of them that the 8 halves of bytes of each word name: the n-th one of all words in
 * vector n. No instruction takes floats from a table of 16, but one takes bytes, whose neighbours are then put together. */
typedef struct {
  ivec bytes[4];
} float_table;
INLINED float_table float_table_of(const float* from) {
  float_table table;
  uint8_t bytes[64], turned[4][16];
  memcpy(bytes, from, sizeof(bytes));
  for (int n = 0; n < 64; n++) turned[n % 4][n / 4] = bytes[n];
  for (int n = 0; n < 4; n++) table.bytes[n] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)turned[n]));
  return table;
}
INLINED void looked_up(float_table table, ivec words, fvec* found) {
  /* The first bytes of the four words of a half, then their second ones, ... */
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const ivec low = _mm256_set1_epi8(0x0f), ordered = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order));
  UNROLLED(int odd = 0; odd < 2; odd++) {
    const ivec places = _mm256_and_si256(odd ? _mm256_srli_epi16(ordered, 4) : ordered, low);
    ivec v[4], pairs[2][2];
    UNROLLED(int n = 0; n < 4; n++) v[n] = _mm256_shuffle_epi8(table.bytes[n], places);
    UNROLLED(int n = 0; n < 2; n++) {
      pairs[n][0] = _mm256_unpacklo_epi8(v[2 * n], v[2 * n + 1]);
      pairs[n][1] = _mm256_unpackhi_epi8(v[2 * n], v[2 * n + 1]);
    }
    UNROLLED(int n = 0; n < 2; n++) {
      found[4 * n + odd] = as_floats(_mm256_unpacklo_epi16(pairs[0][n], pairs[1][n]));
      found[4 * n + 2 + odd] = as_floats(_mm256_unpackhi_epi16(pairs[0][n], pairs[1][n]));
    }
  }
}

/* `then` where a is equal to b, or less. */
INLINED fvec if_equal(ivec a, ivec b, fvec then, fvec otherwise) {
  return _mm256_blendv_ps(otherwise, then, as_floats(_mm256_cmpeq_epi32(a, b)));
}
INLINED fvec if_less(ivec a, ivec b, fvec then, fvec otherwise) {
  return _mm256_blendv_ps(otherwise, then, as_floats(_mm256_cmpgt_epi32(b, a)));
}

/* 8 rows of 8 words become columns: pairs, then fours of neighbouring rows within halves, then halves. */
INLINED void turn(fvec* v) {
  fvec w[8];
  UNROLLED(int n = 0; n < 8; n += 2) {
    w[n] = _mm256_unpacklo_ps(v[n], v[n + 1]);
    w[n + 1] = _mm256_unpackhi_ps(v[n], v[n + 1]);
  }
  UNROLLED(int n = 0; n < 8; n += 4) UNROLLED(int half = 0; half < 2; half++) {
    v[n + 2 * half] = _mm256_shuffle_ps(w[n + half], w[n + half + 2], 0x44);
    v[n + 2 * half + 1] = _mm256_shuffle_ps(w[n + half], w[n + half + 2], 0xee);
  }
  UNROLLED(int n = 0; n < 4; n++) {
    w[n] = _mm256_permute2f128_ps(v[n], v[n + 4], 0x20);
    w[n + 4] = _mm256_permute2f128_ps(v[n], v[n + 4], 0x31);
  }
  UNROLLED(int n = 0; n < 8; n++) v[n] = w[n];
}

/* The sum of the lanes. */
INLINED int32_t integer_total(ivec v) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 1)));
}

/* The sums over the lanes of each of `count` vectors. */
INLINED void totals(const ivec* sums, const int count, int32_t* found) {
  UNROLLED(int n = 0; n < count; n++) found[n] = integer_total(sums[n]);
}

/* The sum of a row of bytes. */
INLINED int32_t row_sum(const int8_t* row, int64_t depth) {
  ivec sum = no_integers();
  for (int64_t t = 0; t < depth; t += LINE) {
    const ivec pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), line_of(row + t, depth - t));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return integer_total(sum);
}

/* How a line of rhs is multiplied by bytes, exactly: the instruction adds two products of an unsigned byte by a signed one
 * in 16 bits.
 *
 * BYTES: the sizes of rhs are the unsigned ones, and lhs takes over the signs: 2 * 128 * 127 fits. WIDENED: lhs has a -128,
 * whose sign cannot be turned, so both are widened to 16 bits. Numbers in 4 bits are looked up in a table of differences
 * from the least of them, as unsigned bytes. NEAR: up to NEAREST of them, four products fit. TURNED: the same without a
 * table, as the order of integers in 4 bits differs from that of their indices by some bits. FAR: they are widened. */
typedef enum { BYTES, WIDENED, TURNED, NEAR, FAR } unsigned_kind;
#define KINDS(of) of(BYTES) of(WIDENED) of(TURNED) of(NEAR) of(FAR)
#define LINES(kind) ((kind) <= WIDENED ? 1 : 2)
enum { NEAREST = 63 };

typedef struct {
  unsigned_kind kind;
  int8_t least;
  ivec key; /* the bits of two numbers, or the table */
} unsigned_form;

INLINED unsigned_form unsigned_form_of(const product* p) {
  if (!p->four_bits) return (unsigned_form){BYTES, 0, no_integers()};
  const int8_t least = least_of_table(p->table);
  int8_t differences[16];
  int turned = 1, near = 1;
  for (int n = 0; n < 16; n++) {
    differences[n] = (int8_t)(p->table[n] - least);
    turned &= differences[n] == (n ^ differences[0]);
    near &= p->table[n] - least <= NEAREST;
  }
  if (turned) return (unsigned_form){TURNED, least, _mm256_set1_epi8((char)(differences[0] * 0x11))};
  const __m128i table = _mm_loadu_si128((const __m128i*)differences);
  return (unsigned_form){near ? NEAR : FAR, least, _mm256_broadcastsi128_si256(table)};
}

/* What multiplies some rows of lhs, which lie side by side: `depth` numbers in all. */
INLINED unsigned_kind kind_for(unsigned_kind kind, const int8_t* lhs, int64_t depth) {
  if (kind != BYTES) return kind;
  ivec found = no_integers();
  for (int64_t t = 0; t < depth; t += LINE)
    found = _mm256_or_si256(found, _mm256_cmpeq_epi8(line_of(lhs + t, depth - t), _mm256_set1_epi8(-128)));
  return _mm256_testz_si256(found, found) ? BYTES : WIDENED;
}

/* The bytes at even places of a line, with their signs, in 16 bits, and those at odd ones. */
INLINED void spread(ivec both, ivec* bytes) {
  bytes[0] = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8);
  bytes[1] = _mm256_srai_epi16(both, 8);
}

INLINED void unsigned_lines(const unsigned_kind kind, ivec key, ivec packed, ivec* lines) {
  if (kind == BYTES) {
    lines[0] = _mm256_abs_epi8(packed);
    lines[1] = packed;
    return;
  }
  if (kind == WIDENED) {
    spread(packed, lines);
    return;
  }
  const ivec low = _mm256_set1_epi8(0x0f);
  if (kind == TURNED) packed = _mm256_xor_si256(packed, key);
  lines[0] = _mm256_and_si256(packed, low);
  lines[1] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
  if (kind != TURNED) lines[0] = _mm256_shuffle_epi8(key, lines[0]), lines[1] = _mm256_shuffle_epi8(key, lines[1]);
}

/* sums += more. Of the intrinsic GCC makes sums of two new ones and copies them, which then do not fit the registers. */
#define ADD(sums, more) __asm__("vpaddd %1, %0, %0" : "+x"(sums) : "x"(more))
#define ADD_PAIRS(sums, pairs) ADD(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))

/* sums += lines * what of lhs lies at x, as it was laid out. */
INLINED ivec with_products(const unsigned_kind kind, ivec sums, const ivec* lines, const int8_t* x) {
  if (kind == BYTES) {
    ADD_PAIRS(sums, _mm256_maddubs_epi16(lines[0], _mm256_sign_epi8(load_line(x), lines[1])));
    return sums;
  }
  if (kind == TURNED || kind == NEAR) {
    const ivec first = _mm256_maddubs_epi16(lines[0], load_line(x));
    ADD_PAIRS(sums, _mm256_add_epi16(first, _mm256_maddubs_epi16(lines[1], load_line(x + LINE))));
    return sums;
  }
  UNROLLED(int n = 0; n < 2; n++) {
    if (n == LINES(kind)) break;
    ivec bytes[2], own[2] = {lines[0], lines[1]};
    spread(load_line(x + n * LINE), bytes);
    if (kind == FAR) own[0] = _mm256_and_si256(lines[n], _mm256_set1_epi16(0xff)), own[1] = _mm256_srli_epi16(lines[n], 8);
    UNROLLED(int half = 0; half < 2; half++) ADD(sums, _mm256_madd_epi16(own[half], bytes[half]));
  }
  return sums;
}

/* How lhs is laid out beside numbers in 4 bits: the even bytes of two lines that follow each other, then the odd ones. */
INLINED void byte_pairs(ivec* lines) {
  const ivec low = _mm256_set1_epi16(0xff);
  const ivec even = _mm256_packus_epi16(_mm256_and_si256(lines[0], low), _mm256_and_si256(lines[1], low));
  const ivec odd = _mm256_packus_epi16(_mm256_srli_epi16(lines[0], 8), _mm256_srli_epi16(lines[1], 8));
  lines[0] = _mm256_permute4x64_epi64(even, 0xd8);
  lines[1] = _mm256_permute4x64_epi64(odd, 0xd8);
}

/* The sums of the lanes of what was laid out at x, beside numbers in 4 bits or bytes. */
#define OF_FOUR_BITS NEAR
INLINED ivec sum_of_lanes(const unsigned_kind kind, const int8_t* x) {
  const ivec ones[2] = {_mm256_set1_epi8(1), _mm256_set1_epi8(1)};
  return with_products(kind, no_integers(), ones, x);
}

/* Rows and columns of tiles whose sums stay in registers: of integers; whether the lines of all
 * columns fit beside them; and how many bytes of each of 8 rows of lhs stay in the first-level cache. */
#define INTEGER_TILES(kind) ROWS_OF(kind, 1, 4) ROWS_OF(kind, 2, 4) ROWS_OF(kind, 4, 2) ROWS_OF(kind, 8, 1)
enum { PIECE_OF_ROW = 4096, HOLDS_LINES = 0 };
/* The columns of a tile of a few rows of floats. */
#define FLOAT_COLUMNS(rows) 1
/* The heights of tiles of floats, the one for so many rows that are left, and the depth that stays in the first-level
 * cache. */
enum { FLOAT_DEPTH = 320 };
#define DEPTH_LOOP _Pragma("GCC unroll 4") for
#define FLOAT_TILES(of) of(2) of(4) of(6)
static inline int64_t tile_height(int64_t left) { return left > 4 ? 6 : left > 2 ? 4 : 2; }

#endif
#endif
