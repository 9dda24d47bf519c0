/* Numbers packed in 3 bits as the same numbers are packed in 4, which the other kernels take.
 *
 * Eight numbers of 3 bits are three bytes: those of 4 bits without the fourth, whose bits are the highest of the halves
 * of the others. A multiplication brings these bits together: bit 3 + 4 h + 8 k is bit 24 + 4 h + k of the result.
 */
#include <string.h>

#include "handler.h"
#include "product.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET __attribute__((target("avx2")))
#else
#define TARGET
#endif

enum { WORDS = 1 << 14 }; /* of a part of the job: a word is 8 numbers of 4 bits */
enum { KEPT = 0x00777777, HIGHEST = 0x00111111, SPREAD = 1 << 24 | 1 << 17 | 1 << 10, FOURTH = 0x77000000 };

typedef struct {
  const uint8_t* from;
  uint8_t* to;
  int64_t words;
  uint32_t sign; /* the bits that are copied to the next higher ones: the third ones of signed integers, or none */
} widening;

static uint32_t widened(const uint8_t* from, uint32_t sign) {
  const uint32_t word = (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16;
  const uint32_t halves = (word & KEPT) | ((word >> 3 & HIGHEST) * SPREAD & FOURTH);
  return halves | (halves & sign) << 1;
}

static TARGET void some_words(void* data, int64_t number, uint8_t* scratch) {
  (void)scratch;
  const widening* w = data;
  const int64_t end = at_most((number + 1) * WORDS, w->words);
  int64_t at = number * WORDS;
#if defined(__x86_64__)
  const __m256i quarters = _mm256_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5), sign = _mm256_set1_epi32((int)w->sign);
  const __m256i triples = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
  for (; at + 11 <= end; at += 8) { /* 32 bytes are read, of which 24 are used */
    const __m256i line = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i*)(w->from + 3 * at)), quarters);
    const __m256i words = _mm256_shuffle_epi8(line, triples);
    const __m256i highest = _mm256_and_si256(_mm256_srli_epi32(words, 3), _mm256_set1_epi32(HIGHEST));
    const __m256i fourth = _mm256_and_si256(_mm256_mullo_epi32(highest, _mm256_set1_epi32(SPREAD)),
                                            _mm256_set1_epi32(FOURTH));
    const __m256i halves = _mm256_or_si256(_mm256_and_si256(words, _mm256_set1_epi32(KEPT)), fourth);
    const __m256i signs = _mm256_slli_epi32(_mm256_and_si256(halves, sign), 1);
    _mm256_storeu_si256((__m256i*)(w->to + 4 * at), _mm256_or_si256(halves, signs));
  }
#endif
  for (; at < end; at++) {
    const uint32_t word = widened(w->from + 3 * at, w->sign);
    memcpy(w->to + 4 * at, &word, sizeof(word));
  }
}

static int64_t size_of(const ffi_buffer* x) {
  int64_t size = 1;
  for (int64_t axis = 0; axis < x->rank; axis++) size *= x->dims[axis];
  return size;
}

EXPORTED ffi_error* jqinject_three_bits(ffi_call_frame* call) {
  static const char* const wanted = "three_bits takes uint8 (..., 3 n) and an int32, gives uint8 (..., 4 n)";
  if (is_about_version(call)) return NULL;
  if (call->args.size != 2 || call->results.size != 1) return refuse(call, wanted);
  const ffi_buffer *x = call->args.buffers[0], *sign = call->args.buffers[1], *out = call->results.buffers[0];
  const int64_t words = size_of(out) / 4;
  const int fits = x->dtype == FFI_U8 && out->dtype == FFI_U8 && sign->dtype == FFI_S32 && size_of(sign) == 1 &&
                   size_of(x) == 3 * words && size_of(out) == 4 * words;
  if (!fits) return refuse(call, wanted);
  widening w = {x->data, out->data, words, (uint32_t)*(const int32_t*)sign->data};
  return share(some_words, &w, parts(words, WORDS), threads_of(call)) ? NULL
                                                                      : refuse(call, "jqinject's kernels: no memory");
}
