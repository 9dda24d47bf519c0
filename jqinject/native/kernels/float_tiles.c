/* Floats times stored numbers (int8, or in 4 bits): many rows, with AVX-512.
 *
 * A tile is TILE_ROWS x TILE_COLUMNS results, whose sums of 16 lanes stay in registers over FLOAT_DEPTH. Before it,
 * TILE_COLUMNS rows of rhs become floats, scales and zero points included, vector by vector in the order in which the
 * tile reads them; they stay in the first-level cache while all rows of a block of lhs pass, which is laid out in the
 * same order (see layout.c) and stays in the second-level cache.
 */
#include "avx512.h"

#if defined(__x86_64__)

enum { VECTOR = 16 };

INLINED void tile(const int rows, const float* lhs, int64_t stride, const float* rhs, int64_t vectors, float* y,
                  int64_t y_stride, __mmask8 kept, int add) {
  __m512 sums[TILE_ROWS][TILE_COLUMNS], left[TILE_ROWS];
  UNROLLED(int i = 0; i < rows; i++) UNROLLED(int j = 0; j < TILE_COLUMNS; j++) sums[i][j] = _mm512_setzero_ps();
  for (; vectors > 0; vectors--, lhs += VECTOR, rhs += TILE_COLUMNS * VECTOR) {
    UNROLLED(int i = 0; i < rows; i++) left[i] = _mm512_load_ps(lhs + i * stride);
    UNROLLED(int j = 0; j < TILE_COLUMNS; j++) {
      const __m512 right = _mm512_load_ps(rhs + j * VECTOR);
      UNROLLED(int i = 0; i < rows; i++) sums[i][j] = _mm512_fmadd_ps(left[i], right, sums[i][j]);
    }
  }
  UNROLLED(int i = 0; i < rows; i++) {
    __m256 found = float_lane_sums(sums[i]);
    if (add) found = _mm256_add_ps(found, _mm256_maskz_loadu_ps(kept, y + i * y_stride));
    _mm256_mask_storeu_ps(y + i * y_stride, kept, found);
  }
}

#define TILE(rows)                                                                                               \
  static VNNI __attribute__((noinline)) void tile_##rows(const float* lhs, int64_t stride, const float* rhs,     \
                                                         int64_t vectors, float* y, int64_t y_stride,            \
                                                         __mmask8 kept, int add) {                               \
    tile(rows, lhs, stride, rhs, vectors, y, y_stride, kept, add);                                               \
  }
TILE(1)
TILE(2)
TILE(3)

INLINED __m512 scaled(__m512 w, __m512 scale, __m512 zero) { return _mm512_mul_ps(_mm512_sub_ps(w, zero), scale); }

/* A step of one column, whose scales and zero points these are. */
INLINED void unpack_four_bits(const product* p, const int whole_steps, __m512i packed, int64_t first,
                              group_numbers scales, group_numbers zeros, float* to) {
  const __m512i places = groups_of_lanes(p);
  const __m512 table = _mm512_loadu_ps(p->values), scale = of_lanes(whole_steps, scales, 0, first, places);
  const __m512 zero = zeros.first == NULL ? _mm512_setzero_ps() : of_lanes(whole_steps, zeros, 0, first, places);
  UNROLLED(int n = 0; n < 8; n++) {
    const __m512 w = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 4 * n), table);
    _mm512_store_ps(to + n * TILE_COLUMNS * VECTOR, scaled(w, scale, zero));
  }
}

INLINED void unpack_bytes(const product* p, __m512i packed, int64_t first, group_numbers scales, group_numbers zeros,
                          float* to) {
  int8_t bytes[LINE] __attribute__((aligned(LINE)));
  _mm512_store_si512(bytes, packed);
  UNROLLED(int n = 0; n < 4; n++) {
    const int64_t group = group_of_vector(p, first, n);
    const __m512 zero = _mm512_set1_ps(zeros.first == NULL ? 0.0f : zeros.first[group * zeros.group]);
    const __m512 w = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)(bytes + n * VECTOR))));
    _mm512_store_ps(to + n * TILE_COLUMNS * VECTOR, scaled(w, _mm512_set1_ps(scales.first[group * scales.group]), zero));
  }
}

/* Steps [step, end) of at most TILE_COLUMNS rows of rhs (the last one again where there are fewer). */
static VNNI void unpack(const product* p, int64_t column, int64_t columns, int64_t step, int64_t end, float* of_groups,
                        float* to) {
  const int64_t bytes = p->four_bits ? (p->depth + 1) / 2 : p->depth;
  const int64_t vectors = p->four_bits ? 8 : 4;
  const group_numbers scales = stripe_of(p, p->scale, column, columns, of_groups);
  const group_numbers zeros = stripe_of(p, p->zero, column, columns, of_groups + STRIPE * stripe_stride(p));
  for (int j = 0; j < TILE_COLUMNS; j++) {
    const int64_t own = at_most(j, columns - 1);
    const uint8_t* row = (const uint8_t*)p->rhs + (column + own) * p->rhs_stride;
    const group_numbers own_scales = from_column(scales, own), own_zeros = from_column(zeros, own);
    group_place at = group_of_step(p, step);
    for (int64_t s = step; s < end; s++, at = next_group(p, at)) {
      const __m512i packed = packed_line(row, s * LINE, bytes);
      float* place = to + ((s - step) * vectors * TILE_COLUMNS + j) * VECTOR;
      _mm_prefetch((const char*)row + TILE_COLUMNS * p->rhs_stride + s * LINE, _MM_HINT_T1);
      if (!p->four_bits)
        unpack_bytes(p, packed, at.first, own_scales, own_zeros, place);
      else if (p->groups_a_step == 0)
        unpack_four_bits(p, 1, packed, at.first, own_scales, own_zeros, place);
      else
        unpack_four_bits(p, 0, packed, at.first, own_scales, own_zeros, place);
    }
  }
}

VNNI void float_tiles(const product* p, const block* b, uint8_t* scratch) {
  float *unpacked = (float*)scratch, *scales = unpacked + TILE_COLUMNS * FLOAT_DEPTH;
  const int64_t size = p->four_bits ? 128 : 64, at_once = FLOAT_DEPTH / size, stride = p->steps * size;
  for (int64_t step = 0; step < p->steps; step += at_once) {
    const int64_t end = at_most(step + at_once, p->steps), vectors = (end - step) * size / VECTOR;
    for (int64_t j = b->column; j < b->column_end; j += TILE_COLUMNS) {
      const int64_t columns = at_most(b->column_end - j, TILE_COLUMNS);
      const __mmask8 kept = (__mmask8)(0xff >> (TILE_COLUMNS - columns));
      unpack(p, j, columns, step, end, scales, unpacked);
      for (int64_t i = b->row; i < b->row_end; i += TILE_ROWS) {
        const float* lhs = (const float*)p->laid_out + i * stride + step * size;
        const int64_t left = b->row_end - i;
        (left == 1   ? tile_1
         : left == 2 ? tile_2
                     : tile_3)(lhs, stride, unpacked, vectors, p->y + i * p->columns + j, p->columns, kept, step > 0);
      }
    }
  }
}

#endif
