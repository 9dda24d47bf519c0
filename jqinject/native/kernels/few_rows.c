/* All products, of a few rows, with NEON; and in plain C, which tests run on other processors.
 *
 * Column by column: CHUNK numbers of a row of rhs are unpacked to bytes, or to floats beside floats, and multiplied by
 * the same part of each row of lhs while they are in the first-level cache. Sums of integers are exact: bytes are
 * multiplied by `sdot`, or into 16 bits that are added up in 32. In groups, the sum of each group is multiplied by its
 * scale, and these are added up in float32.
 */
#include "few_rows.h"

#include <stdatomic.h>
#include <string.h>

#include "xla_ffi.h"

enum { CHUNK = 4096 };

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#define SDOT __attribute__((target("arch=armv8.2-a+dotprod")))

static SDOT int32_t dot_bytes_sdot(const int8_t* a, const int8_t* b, int64_t count) {
  int32x4_t sums = vdupq_n_s32(0), more = vdupq_n_s32(0);
  int64_t t = 0;
  for (; t + 32 <= count; t += 32) {
    sums = vdotq_s32(sums, vld1q_s8(a + t), vld1q_s8(b + t));
    more = vdotq_s32(more, vld1q_s8(a + t + 16), vld1q_s8(b + t + 16));
  }
  if (t + 16 <= count) {
    sums = vdotq_s32(sums, vld1q_s8(a + t), vld1q_s8(b + t));
    t += 16;
  }
  uint32_t found = (uint32_t)vaddvq_s32(vaddq_s32(sums, more));
  for (; t < count; t++) found += (uint32_t)(a[t] * b[t]);
  return (int32_t)found;
}

static int32_t dot_bytes_widened(const int8_t* a, const int8_t* b, int64_t count) {
  int32x4_t sums = vdupq_n_s32(0);
  int64_t t = 0;
  for (; t + 16 <= count; t += 16) {
    const int8x16_t x = vld1q_s8(a + t), w = vld1q_s8(b + t);
    sums = vpadalq_s16(sums, vmull_s8(vget_low_s8(x), vget_low_s8(w)));
    sums = vpadalq_s16(sums, vmull_high_s8(x, w));
  }
  uint32_t found = (uint32_t)vaddvq_s32(sums);
  for (; t < count; t++) found += (uint32_t)(a[t] * b[t]);
  return (int32_t)found;
}

static int has_sdot(void) {
#if defined(__linux__)
  return (int)(getauxval(AT_HWCAP) >> 20 & 1); /* HWCAP_ASIMDDP */
#else
  return 1; /* Apple's have it. */
#endif
}

static int32_t dot_bytes(const int8_t* a, const int8_t* b, int64_t count) {
  static atomic_int known; /* 1: no, 2: yes */
  int found = atomic_load_explicit(&known, memory_order_relaxed);
  if (found == 0) atomic_store_explicit(&known, found = has_sdot() + 1, memory_order_relaxed);
  return (found == 2 ? dot_bytes_sdot : dot_bytes_widened)(a, b, count);
}

static int32_t sum_bytes(const int8_t* a, int64_t count) {
  int32x4_t sums = vdupq_n_s32(0);
  int64_t t = 0;
  for (; t + 16 <= count; t += 16) sums = vpadalq_s16(sums, vpaddlq_s8(vld1q_s8(a + t)));
  int32_t found = vaddvq_s32(sums);
  for (; t < count; t++) found += a[t];
  return found;
}

static float dot_floats(const float* a, const float* b, int64_t count) {
  float32x4_t sums = vdupq_n_f32(0), more = vdupq_n_f32(0);
  int64_t t = 0;
  for (; t + 8 <= count; t += 8) {
    sums = vfmaq_f32(sums, vld1q_f32(a + t), vld1q_f32(b + t));
    more = vfmaq_f32(more, vld1q_f32(a + t + 4), vld1q_f32(b + t + 4));
  }
  float found = vaddvq_f32(vaddq_f32(sums, more));
  for (; t < count; t++) found += a[t] * b[t];
  return found;
}

static void unpack_bytes(const uint8_t* from, const int8_t* table, int8_t* to) {
  const uint8x16_t packed = vld1q_u8(from);
  const int8x16_t numbers = vld1q_s8(table);
  const int8x16_t even = vqtbl1q_s8(numbers, vandq_u8(packed, vdupq_n_u8(0x0f)));
  const int8x16_t odd = vqtbl1q_s8(numbers, vshrq_n_u8(packed, 4));
  vst1q_s8(to, vzip1q_s8(even, odd));
  vst1q_s8(to + 16, vzip2q_s8(even, odd));
}

static void dequantize(const int8_t* from, int64_t count, float zero, float scale, float* to) {
  const float32x4_t zeros = vdupq_n_f32(zero), scales = vdupq_n_f32(scale);
  int64_t t = 0;
  for (; t + 8 <= count; t += 8) {
    const int16x8_t wide = vmovl_s8(vld1_s8(from + t));
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), high = vcvtq_f32_s32(vmovl_high_s16(wide));
    vst1q_f32(to + t, vmulq_f32(vsubq_f32(low, zeros), scales));
    vst1q_f32(to + t + 4, vmulq_f32(vsubq_f32(high, zeros), scales));
  }
  for (; t < count; t++) to[t] = ((float)from[t] - zero) * scale;
}

/* Four floats of a table of 16, which is 64 bytes; `starts` has the first byte of each, four times. */
static inline void look_up_four(uint8x16x4_t table, uint8x16_t starts, float* to) {
  const uint8x16_t within = vreinterpretq_u8_u32(vdupq_n_u32(0x03020100));
  vst1q_f32(to, vreinterpretq_f32_u8(vqtbl4q_u8(table, vaddq_u8(starts, within))));
}

/* The floats of a table of 16 at these places. */
static void look_up(const int8_t* places, int64_t count, const float* table, float* to) {
  const uint8_t* bytes = (const uint8_t*)table;
  const uint8x16x4_t whole = {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
  int64_t t = 0;
  for (; t + 16 <= count; t += 16) {
    const uint8x16_t starts = vshlq_n_u8(vreinterpretq_u8_s8(vld1q_s8(places + t)), 2);
    const uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(starts, starts));
    const uint16x8_t high = vreinterpretq_u16_u8(vzip2q_u8(starts, starts));
    look_up_four(whole, vreinterpretq_u8_u16(vzip1q_u16(low, low)), to + t);
    look_up_four(whole, vreinterpretq_u8_u16(vzip2q_u16(low, low)), to + t + 4);
    look_up_four(whole, vreinterpretq_u8_u16(vzip1q_u16(high, high)), to + t + 8);
    look_up_four(whole, vreinterpretq_u8_u16(vzip2q_u16(high, high)), to + t + 12);
  }
  for (; t < count; t++) to[t] = table[places[t]];
}

#else

static int32_t dot_bytes(const int8_t* a, const int8_t* b, int64_t count) {
  uint32_t found = 0;
  for (int64_t t = 0; t < count; t++) found += (uint32_t)(a[t] * b[t]);
  return (int32_t)found;
}

static int32_t sum_bytes(const int8_t* a, int64_t count) {
  int32_t found = 0;
  for (int64_t t = 0; t < count; t++) found += a[t];
  return found;
}

static float dot_floats(const float* a, const float* b, int64_t count) {
  float found = 0;
  for (int64_t t = 0; t < count; t++) found += a[t] * b[t];
  return found;
}

static void unpack_bytes(const uint8_t* from, const int8_t* table, int8_t* to) {
  for (int n = 0; n < 32; n++) to[n] = table[from[n / 2] >> n % 2 * 4 & 15];
}

static void dequantize(const int8_t* from, int64_t count, float zero, float scale, float* to) {
  for (int64_t t = 0; t < count; t++) to[t] = ((float)from[t] - zero) * scale;
}

static void look_up(const int8_t* places, int64_t count, const float* table, float* to) {
  for (int64_t t = 0; t < count; t++) to[t] = table[places[t]];
}
#endif

static const int8_t PLACES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* `count` numbers of a column from `start` (even) on, as bytes: those of the table, or bytes themselves. */
static const int8_t* bytes_of(const product* p, int64_t column, int64_t start, int64_t count, const int8_t* table,
                              int8_t* to) {
  const int8_t* row = p->rhs + column * p->rhs_stride;
  if (!p->four_bits) return row + start;
  const uint8_t* packed = (const uint8_t*)row + start / 2;
  int64_t t = 0;
  for (; t + 32 <= count; t += 32) unpack_bytes(packed + t / 2, table, to + t);
  for (; t < count; t++) to[t] = table[packed[t / 2] >> t % 2 * 4 & 15];
  return to;
}

void few_rows_of_integers(const product* p, const block* b, uint8_t* scratch) {
  for (int64_t j = b->column; j < b->column_end; j++)
    for (int64_t start = 0; start < p->depth; start += CHUNK) {
      const int64_t count = at_most(p->depth - start, CHUNK);
      const int8_t* w = bytes_of(p, j, start, count, p->table, (int8_t*)scratch);
      for (int64_t i = b->row; i < b->row_end; i++) {
        int32_t* out = p->out + i * p->columns + j;
        const uint32_t found = (uint32_t)dot_bytes(p->lhs + i * p->depth + start, w, count);
        *out = (int32_t)(start ? (uint32_t)*out + found : found);
      }
    }
}

static float float_of_bits(uint32_t bits) {
  float found;
  memcpy(&found, &bits, sizeof(found));
  return found;
}

/* 8 bits without a mantissa: powers of 2 from 2^-127 on, the last one nan. */
static float of_e8m0(uint32_t code) {
  return float_of_bits(code == 0 ? 0x00400000 : code == 0xff ? 0x7fc00000 : code << 23);
}

/* A sign, 4 bits of exponent and 3 of mantissa; only 0x7f and 0xff are nan. */
static float of_e4m3(uint32_t code) {
  const uint32_t size = code & 0x7f;
  const float found = size == 0x7f ? float_of_bits(0x7fc00000)
                      : size < 8   ? (float)size * 0x1p-9f
                                   : float_of_bits((size << 20) + (120 << 23));
  return code & 0x80 ? -found : found;
}

static float of_group(const product* p, given_numbers from, int64_t group, int64_t column) {
  const int64_t place = group * p->of_group + column * p->of_column;
  const uint8_t* codes = from.data;
  switch (from.dtype) {
    case FFI_F32: return ((const float*)from.data)[place];
    case FFI_S8: return ((const int8_t*)from.data)[place];
    case FFI_F8E8M0FNU: return of_e8m0(codes[place]);
    case FFI_F8E4M3FN: return of_e4m3(codes[place]);
    default: return codes[place];
  }
}

/* Adds numbers [start, start + count), which are of group g and whose bytes are w, to the results of a column. */
static void add_group(const product* p, const block* b, int64_t column, int64_t g, int64_t start, int64_t count,
                      const int8_t* w) {
  const float scale = of_group(p, p->scale, g, column);
  const float zero = p->zero.data == NULL ? 0 : of_group(p, p->zero, g, column);
  for (int64_t i = b->row; i < b->row_end; i++) {
    const int8_t* x = p->lhs + i * p->depth + start;
    float part = (float)dot_bytes(x, w, count);
    if (p->zero.data != NULL) part -= zero * (float)sum_bytes(x, count);
    part *= scale * p->lhs_scale[i * p->lhs_groups + (p->lhs_groups == 1 ? 0 : g)];
    float* y = p->y + i * p->columns + column;
    *y = start ? *y + part : part;
  }
}

void few_rows_of_groups(const product* p, const block* b, uint8_t* scratch) {
  const int64_t size = p->groups == 1 ? p->depth : p->group;
  for (int64_t j = b->column; j < b->column_end; j++)
    for (int64_t start = 0; start < p->depth; start += CHUNK) {
      const int64_t count = at_most(p->depth - start, CHUNK);
      const int8_t* w = bytes_of(p, j, start, count, p->table, (int8_t*)scratch);
      for (int64_t t = 0, end; t < count; t = end) {
        const int64_t g = (start + t) / size;
        end = at_most((g + 1) * size - start, count);
        add_group(p, b, j, g, start + t, end - t, w + t);
      }
    }
}

void few_rows_of_floats(const product* p, const block* b, uint8_t* scratch) {
  const int64_t size = p->groups == 1 ? p->depth : p->group;
  float* w = (float*)(scratch + CHUNK);
  for (int64_t j = b->column; j < b->column_end; j++)
    for (int64_t start = 0; start < p->depth; start += CHUNK) {
      const int64_t count = at_most(p->depth - start, CHUNK);
      const int8_t* bytes = bytes_of(p, j, start, count, PLACES, (int8_t*)scratch);
      for (int64_t t = 0, end; t < count; t = end) {
        const int64_t g = (start + t) / size;
        const float scale = of_group(p, p->scale, g, j), zero = p->zero.data == NULL ? 0 : of_group(p, p->zero, g, j);
        end = at_most((g + 1) * size - start, count);
        if (p->four_bits) {
          float scaled[16];
          for (int n = 0; n < 16; n++) scaled[n] = (p->values[n] - zero) * scale;
          look_up(bytes + t, end - t, scaled, w + t);
        } else {
          dequantize(bytes + t, end - t, zero, scale, w + t);
        }
      }
      for (int64_t i = b->row; i < b->row_end; i++) {
        float* y = p->y + i * p->columns + j;
        const float found = dot_floats(p->floats + i * p->depth + start, w, count);
        *y = start ? *y + found : found;
      }
    }
}
