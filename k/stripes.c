/* Scales and zero points of a stripe of columns, in float32 and in the order in which a kernel reads them.
 *
 * They are given group by group, or column by column, some of them in a byte each. Floats that lie as they are read are
 * left where they are. Of others, squares of STRIPE groups x STRIPE columns are read in vectors, turned where they lie the
 * other way than they are read, and written to the thread's memory. Numbers of one group that lie side by side are a line
 * or less of every stripe: those of the next stripe are fetched meanwhile, because lines so far apart are not foreseen by
 * the processor.
 */
#include "stripes.h"
#include "xla_ffi.h"

#if defined(__x86_64__)

/* Scales of 8 bits without a mantissa: powers of 2 from 2^-127 on, the last one nan. */
INLINED fvec of_e8m0(ivec codes) {
  const ivec least = V(set1_epi32)(0x00400000), nan = V(set1_epi32)(0x7fc00000);
  const fvec powers = if_equal(codes, no_integers(), as_floats(least), as_floats(V(slli_epi32)(codes, 23)));
  return if_equal(codes, V(set1_epi32)(0xff), as_floats(nan), powers);
}

/* Numbers with a sign, 4 bits of exponent and 3 of mantissa; only 0x7f and 0xff are nan. */
INLINED fvec of_e4m3(ivec codes) {
  const ivec sign = V(slli_epi32)(V(srli_epi32)(codes, 7), 31), size = V(srli_epi32)(V(slli_epi32)(codes, 25), 25);
  const fvec nan = as_floats(V(set1_epi32)(0x7fc00000));
  const fvec small = V(mul_ps)(V(cvtepi32_ps)(size), V(set1_ps)(0x1p-9f));
  const fvec large = as_floats(V(add_epi32)(V(slli_epi32)(size, 20), V(set1_epi32)(120 << 23)));
  const fvec found = if_less(size, V(set1_epi32)(8), small, large);
  return V(or_ps)(if_equal(size, V(set1_epi32)(0x7f), nan, found), as_floats(sign));
}

/* The first `count` of LANES numbers from place `first` on, then zeros. */
static TARGET fvec read(given_numbers from, int64_t first, int64_t count) {
  if (from.dtype == FFI_F32 && count >= LANES) return V(loadu_ps)((const float*)from.data + first);
  const lane_mask kept = first_lanes(at_most(count, LANES));
  if (from.dtype == FFI_F32) return load_first(kept, (const float*)from.data + first);
  const __m128i bytes = first_bytes((const uint8_t*)from.data + first, count);
  if (from.dtype == FFI_S8) return V(cvtepi32_ps)(widened_signed(bytes));
  const ivec codes = widened(bytes);
  const fvec found = from.dtype == FFI_F8E8M0FNU  ? of_e8m0(codes)
                       : from.dtype == FFI_F8E4M3FN ? of_e4m3(codes)
                                                    : V(cvtepi32_ps)(codes);
  return only_first(kept, found);
}

/* A square: groups from `group` on of a stripe; zeros where there are fewer. */
static TARGET void read_square(const product* p, given_numbers from, stripe s, int64_t group, fvec* v) {
  const int by_column = p->of_group == 1 && p->of_column != 1;
  const int64_t groups = s.group + s.groups - group, first = group * p->of_group + s.column * p->of_column;
  const int64_t lines = by_column ? s.columns : groups, width = by_column ? groups : s.columns;
  const int64_t apart = by_column ? p->of_column : p->of_group, size = from.dtype == FFI_F32 ? sizeof(float) : 1;
  for (int n = 0; n < STRIPE; n++) {
    v[n] = n < lines && width > 0 ? read(from, first + n * apart, width) : V(setzero_ps)();
    if (!by_column && n < lines) _mm_prefetch((const char*)from.data + (first + n * apart + STRIPE) * size, _MM_HINT_T0);
  }
}

TARGET group_numbers read_stripe(const product* p, given_numbers from, stripe_order order, stripe s, float* to) {
  if (from.data == NULL) return (group_numbers){NULL, 0, 0};
  const int by_column = p->of_group == 1 && p->of_column != 1, by_group = order == GROUP_BY_GROUP;
  if (by_group && p->of_column == 1 && from.dtype == FFI_F32 && s.columns == STRIPE) /* they lie as they are wanted */
    return (group_numbers){(const float*)from.data + s.group * p->of_group + s.column, p->of_group, 1};
  const int64_t stride = stripe_stride(p), end = by_group ? s.groups : stride;
  for (int64_t group = 0; group < end; group += STRIPE) {
    fvec v[STRIPE];
    read_square(p, from, s, s.group + group, v);
    if (by_column == by_group) turn(v);
    UNROLLED(int n = 0; n < STRIPE; n++)
    V(storeu_ps)(to + (by_group ? (group + n) * STRIPE : n * stride + group), v[n]);
  }
  return by_group ? (group_numbers){to, STRIPE, 1} : (group_numbers){to, 1, stride};
}

#endif
