/* Elementwise operations on the numbers around a product: a few at a time, so that they stay in the first-level cache.
 *
 * They are the operations of the program that XLA would run, in its order and in float32. As XLA does, a multiplication
 * and an addition that follows it round once; numbers in bfloat16 are rounded after each operation. Inner loops have a
 * constant length, so that compilers turn them into vectors.
 */
#include "steps.h"

#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* at O2 GCC leaves half of these loops without vectors; Clang does not */
#endif

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma")))
#else
#define TARGET
#endif

enum { CHUNK = 256, GROUP = 16 }; /* numbers */
typedef float chunk[CHUNK];
/* Of `count` numbers, and up to GROUP - 1 that nobody reads. */
#define EACH(assignment)                       \
  for (int64_t g = 0; g < count; g += GROUP) \
    for (int64_t i = g; i < g + GROUP; i++) assignment

/* The operands of each kind. */
static const int COUNTS[KINDS] = {1, 1, 1, 1, 1, 1, 0, 0, 1, 2, 1, 2, 2};

static int read_step_operand(step_operand* operand, const ffi_buffer* given, int dtype, int64_t rows, int64_t columns) {
  if (given->rank != 2 || given->dtype != dtype) return 0;
  const int64_t* dims = given->dims;
  *operand = (step_operand){given, dims[0] == 1 ? 0 : dims[1], dims[1] != 1};
  return (dims[0] == 1 || dims[0] == rows) && (dims[1] == 1 || dims[1] == columns);
}

int read_steps(steps* s, const int32_t* codes, int64_t count, int64_t rows, int64_t columns, ffi_buffer* const** next,
               ffi_buffer* const* end) {
  if (count < 0 || count > MOST_STEPS) return 0;
  s->count = (int)count;
  for (int n = 0; n < count; n++) {
    step* now = &s->first[n];
    const int kind = codes[n];
    if (kind < 0 || kind >= KINDS || (kind == SUBTRACT_INTEGER && n > 0) || end - *next < COUNTS[kind]) return 0;
    now->kind = kind, now->count = COUNTS[kind];
    for (int place = 0; place < now->count; place++) {
      const int dtype = kind == SUBTRACT_INTEGER ? FFI_S32 : FFI_F32;
      if (!read_step_operand(&now->operands[place], *(*next)++, dtype, rows, columns)) return 0;
    }
  }
  return 1;
}

/* Where the number of an operand is that belongs to an element; 4 bytes each. */
static const char* number_at(const step_operand* operand, int64_t row, int64_t column) {
  const int64_t place = row * operand->of_row + column * operand->of_column;
  return (const char*)operand->given->data + place * (int64_t)sizeof(float);
}

/* `count` numbers, and zeros up to the end of their last group. */
static inline void copy_numbers(void* to, const void* from, int64_t count, int64_t size) {
  if (count % GROUP) memset((char*)to + count / GROUP * GROUP * size, 0, (size_t)(GROUP * size));
  memcpy(to, from, (size_t)(count * size));
}

/* `count` numbers of an operand: where they lie, or a copy if they end within a group; NULL if they are all *one. */
static const float* read_numbers_of(const step_operand* operand, int64_t row, int64_t column, int64_t count, float* one,
                                    chunk copy) {
  const char* at = number_at(operand, row, column);
  memcpy(one, at, sizeof(*one));
  if (!operand->of_column) return NULL;
  if (count % GROUP == 0) return (const float*)at;
  copy_numbers(copy, at, count, sizeof(float));
  return copy;
}

static inline float of_bfloat16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, sizeof(x));
  return x;
}

/* To nearest, ties to even. */
static inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
  return (uint16_t)(x == x ? rounded : nan);
}

/* Reads `count` numbers. Integers have taken off what the first step takes off. */
static TARGET void read_numbers(const matrix* from, const step_operand* integers, int64_t row, int64_t column,
                                int64_t count, chunk x) {
  const char* at = from->data;
  const int64_t place = row * from->stride + column;
  if (from->dtype == FFI_F32) {
    copy_numbers(x, at + place * (int64_t)sizeof(float), count, sizeof(float));
  } else if (from->dtype == FFI_BF16) {
    uint16_t bits[CHUNK];
    copy_numbers(bits, at + place * 2, count, sizeof(*bits));
    EACH(x[i] = of_bfloat16(bits[i]));
  } else {
    int32_t sums[CHUNK];
    copy_numbers(sums, at + place * (int64_t)sizeof(int32_t), count, sizeof(*sums));
    for (int i = 0; integers != NULL && i < count; i++) {
      int32_t off;
      memcpy(&off, number_at(integers, row, column + i), sizeof(off));
      sums[i] = (int32_t)((uint32_t)sums[i] - (uint32_t)off); /* wraps around */
    }
    EACH(x[i] = (float)sums[i]);
  }
}

static TARGET void write_numbers(const matrix* to, int64_t row, int64_t column, int64_t count, const chunk x) {
  char* at = to->data;
  const int64_t place = row * to->stride + column;
  if (to->dtype == FFI_F32) {
    memcpy(at + place * (int64_t)sizeof(float), x, (size_t)count * sizeof(float));
  } else if (to->dtype == FFI_BF16) {
    uint16_t bits[CHUNK];
    EACH(bits[i] = to_bfloat16(x[i]));
    memcpy(at + place * 2, bits, (size_t)count * 2);
  } else {
    int8_t bytes[CHUNK];
    EACH(bytes[i] = (int8_t)(int32_t)(x[i] == x[i] ? x[i] : 0)); /* of at most 8 bits */
    memcpy(at + place, bytes, (size_t)count);
  }
}

static inline float sum(float x, float y) { return x + y; }
static inline float difference(float x, float y) { return x - y; }
static inline float product_of_two(float x, float y) { return x * y; }
static inline float quotient(float x, float y) { return x / y; }
/* A nan is kept, as XLA does. */
static inline float maximum(float x, float y) { return x > y || x != x ? x : y; }
static inline float minimum(float x, float y) { return x < y || x != x ? x : y; }

/* The nearest whole number, ties to even: from 2^23 on floats have no fractions. Without branches, for vectors. */
static inline float nearest(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint32_t size = bits & 0x7fffffff, limit = 0x4b000000; /* 2^23 */
  const uint32_t added = (limit | (bits ^ size)) & -(uint32_t)(size < limit);
  float term;
  memcpy(&term, &added, sizeof(term));
  return __builtin_copysignf((x + term) - term, x);
}

/* x = function(x, y), where y is NULL for `one`. */
#define WITH_OPERAND(function)    \
  if (y != NULL) {                \
    EACH(x[i] = function(x[i], y[i]));   \
  } else {                        \
    EACH(x[i] = function(x[i], one));    \
  }

/* The i-th number of an operand. */
#define NUMBER(place) (numbers[place] == NULL ? ones[place] : numbers[place][i])

static TARGET void change(const steps* s, int n, int64_t row, int64_t column, int64_t count, chunk x) {
  chunk copies[2], factors, terms;
  for (; n < s->count; n++) {
    const step* now = &s->first[n];
    const float* numbers[2] = {NULL};
    float ones[2] = {0}, other;
    for (int place = 0; place < now->count; place++)
      numbers[place] = read_numbers_of(&now->operands[place], row, column, count, &ones[place], copies[place]);
    const float* y = numbers[0];
    const float one = ones[0];
    switch (now->kind) {
      case ADD: WITH_OPERAND(sum) break;
      case SUBTRACT: WITH_OPERAND(difference) break;
      case DIVIDE: WITH_OPERAND(quotient) break;
      case MAXIMUM: WITH_OPERAND(maximum) break;
      case MINIMUM: WITH_OPERAND(minimum) break;
      case ROUND: EACH(x[i] = nearest(x[i])); break;
      case TO_BFLOAT16: EACH(x[i] = of_bfloat16(to_bfloat16(x[i]))); break;
      case REPLACE_EQUAL: EACH(x[i] = x[i] == NUMBER(0) ? NUMBER(1) : x[i]); break;
      case REPLACE_BELOW: EACH(x[i] = x[i] < NUMBER(0) ? NUMBER(1) : x[i]); break;
      case MULTIPLY:
      case MULTIPLY_BY_PRODUCT:
      case MULTIPLY_BY_RECIPROCAL: {
        if (now->kind == MULTIPLY_BY_RECIPROCAL) {
          EACH(factors[i] = 1 / NUMBER(0));
          y = factors;
        }
        if (now->kind == MULTIPLY_BY_PRODUCT) {
          EACH(factors[i] = NUMBER(0) * NUMBER(1));
          y = factors;
        }
        if (n + 1 == s->count || now[1].kind > SUBTRACT) {
          WITH_OPERAND(product_of_two)
          break;
        }
        EACH(factors[i] = y == NULL ? one : y[i]);
        const float* z = read_numbers_of(&now[1].operands[0], row, column, count, &other, copies[1]);
        EACH(terms[i] = z == NULL ? other : z[i]);
        if (now[1].kind == ADD) {
          EACH(x[i] = __builtin_fmaf(x[i], factors[i], terms[i]));
        } else {
          EACH(x[i] = __builtin_fmaf(x[i], factors[i], -terms[i]));
        }
        n++;
        break;
      }
    }
  }
}

TARGET void apply_steps(const steps* s, const matrix* from, const matrix* to, const block* b) {
  const int integers = s->count > 0 && s->first[0].kind == SUBTRACT_INTEGER;
  for (int64_t row = b->row; row < b->row_end; row++)
    for (int64_t column = b->column; column < b->column_end; column += CHUNK) {
      const int64_t count = at_most(b->column_end - column, CHUNK);
      chunk x;
      read_numbers(from, integers ? s->first[0].operands : NULL, row, column, count, x);
      change(s, integers, row, column, count, x);
      write_numbers(to, row, column, count, x);
    }
}
