/* Scales and zero points of a stripe of columns, in float32 and in the order in which a kernel reads them.
 *
 * They are given group by group, or column by column, some of them in a byte each. Squares of 16 groups x 16 columns are
 * read in vectors, turned where they lie the other way than they are read, and written to the thread's memory. Numbers
 * of one group that lie side by side are a line or less of every stripe: those of the next stripe are fetched meanwhile,
 * because lines so far apart are not foreseen by the processor.
 */
#include "stripes.h"

#include "avx512.h"
#include "xla_ffi.h"

#if defined(__x86_64__)

/* 16 scales of 8 bits without a mantissa: powers of 2 from 2^-127 on, the last one nan. */
INLINED __m512 of_e8m0(__m512i codes) {
  const __m512i least = _mm512_set1_epi32(0x00400000), nan = _mm512_set1_epi32(0x7fc00000);
  __m512i bits = _mm512_slli_epi32(codes, 23);
  bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(codes, codes), least);
  return _mm512_castsi512_ps(
      _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(0xff)), nan));
}

/* 16 numbers with a sign, 4 bits of exponent and 3 of mantissa; only 0x7f and 0xff are nan. */
INLINED __m512 of_e4m3(__m512i codes) {
  const __m512i size = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f)), nan = _mm512_set1_epi32(0x7fc00000);
  const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(size), _mm512_set1_ps(0x1p-9f));
  __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8)), _mm512_castps_si512(small));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7f)), nan);
  return _mm512_castsi512_ps(
      _mm512_or_si512(bits, _mm512_slli_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(0x80)), 24)));
}

/* The first `count` of 16 numbers from place `first` on, then zeros. */
static VNNI __m512 read(given_numbers from, int64_t first, int64_t count) {
  const __mmask16 kept = (__mmask16)(count >= 16 ? 0xffff : (1 << count) - 1);
  if (from.dtype == FFI_F32) return _mm512_maskz_loadu_ps(kept, (const float*)from.data + first);
  const __m128i bytes = _mm_maskz_loadu_epi8(kept, (const uint8_t*)from.data + first);
  if (from.dtype == FFI_S8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  const __m512i codes = _mm512_cvtepu8_epi32(bytes);
  const __m512 found = from.dtype == FFI_F8E8M0FNU  ? of_e8m0(codes)
                       : from.dtype == FFI_F8E4M3FN ? of_e4m3(codes)
                                                    : _mm512_cvtepi32_ps(codes);
  return _mm512_maskz_mov_ps(kept, found);
}

/* A square: groups from `group` on of 16 columns; zeros where there are fewer. */
static VNNI void read_square(const product* p, given_numbers from, stripe s, int64_t group, __m512* v) {
  const int by_column = p->of_group == 1 && p->of_column != 1;
  const int64_t groups = s.group + s.groups - group, first = group * p->of_group + s.column * p->of_column;
  const int64_t lines = by_column ? s.columns : groups, width = by_column ? groups : s.columns;
  const int64_t apart = by_column ? p->of_column : p->of_group, size = from.dtype == FFI_F32 ? sizeof(float) : 1;
  for (int n = 0; n < 16; n++) {
    v[n] = n < lines && width > 0 ? read(from, first + n * apart, width) : _mm512_setzero_ps();
    if (!by_column && n < lines) _mm_prefetch((const char*)from.data + (first + n * apart + STRIPE) * size, _MM_HINT_T0);
  }
}

VNNI group_numbers read_stripe(const product* p, given_numbers from, stripe_order order, stripe s, float* to) {
  if (from.data == NULL) return (group_numbers){NULL, 0, 0};
  const int by_column = p->of_group == 1 && p->of_column != 1, by_group = order == GROUP_BY_GROUP;
  const int64_t stride = stripe_stride(p), end = by_group ? s.groups : stride;
  for (int64_t group = 0; group < end; group += 16) {
    __m512 v[16];
    read_square(p, from, s, s.group + group, v);
    if (by_column == by_group) turn(v);
    UNROLLED(int n = 0; n < 16; n++) _mm512_storeu_ps(to + (by_group ? (group + n) * STRIPE : n * stride + group), v[n]);
  }
  return by_group ? (group_numbers){to, STRIPE, 1} : (group_numbers){to, 1, stride};
}

#endif
