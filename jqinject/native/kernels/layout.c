/* Rows of lhs laid out for a call, so that a kernel reads them in the order in which it unpacks rhs.
 *
 * A step is what 64 bytes of rhs hold: 64 int8 or 128 numbers in 4 bits. Zeros fill up the last step.
 *
 * Floats, rhs int8: as they lie. Floats, rhs in 4 bits: 8 vectors of 16, the n-th of which has the numbers n, n + 8,
 * n + 16, ... of the step, because shifting 16 words of 8 indices makes these. Bytes, rhs in 4 bits: those at even
 * places, then those at odd ones.
 *
 * Either way a lane of what a kernel sums has numbers that lie together: 8 of a step of 128, 4 of a step of 64. With
 * groups, and where rhs has zero points, their sums are needed too: `lane_sums`, 16 for each step.
 */
#include "layout.h"

#include <string.h>

static void float_step(const float* from, int64_t left, int four_bits, float* to) {
  const int size = four_bits ? 128 : 64;
  for (int t = 0; t < size; t++) to[four_bits ? t % 8 * 16 + t / 8 : t] = t < left ? from[t] : 0.0f;
}

static void byte_step(const int8_t* from, int64_t left, int four_bits, int8_t* to) {
  const int size = four_bits ? 128 : 64;
  for (int t = 0; t < size; t++) to[four_bits ? t % 2 * 64 + t / 2 : t] = t < left ? from[t] : 0;
}

/* The sums of the numbers that each lane has: neighbours, but for floats beside int8, whose lanes have every 16th. */
static void sum_lanes(const float* from, int64_t left, int size, int apart, float* to) {
  memset(to, 0, 16 * sizeof(float));
  for (int t = 0; t < size && t < left; t++) to[apart ? t % 16 : t / (size / 16)] += from[t];
}

void lay_out_floats(const float* from, int64_t rows, int64_t depth, int four_bits, float* to, float* sums) {
  const int size = four_bits ? 128 : 64;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t t = 0; t < depth; t += size, to += size) {
      float_step(from + i * depth + t, depth - t, four_bits, to);
      if (sums == NULL) continue;
      sum_lanes(from + i * depth + t, depth - t, size, !four_bits, sums);
      sums += 16;
    }
}

void lay_out_bytes(const int8_t* from, int64_t rows, int64_t depth, int four_bits, int8_t* to, float* sums) {
  const int size = four_bits ? 128 : 64;
  float numbers[128];
  for (int64_t i = 0; i < rows; i++)
    for (int64_t t = 0; t < depth; t += size, to += size) {
      byte_step(from + i * depth + t, depth - t, four_bits, to);
      if (sums == NULL) continue;
      for (int n = 0; n < size && n < depth - t; n++) numbers[n] = from[i * depth + t + n];
      sum_lanes(numbers, depth - t, size, 0, sums);
      sums += 16;
    }
}

void lay_out_scales(const float* from, int64_t rows, int64_t groups, int64_t group, int64_t steps, int size, float* to) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t lane = 0; lane < steps * 16; lane++) {
      const int64_t found = groups == 1 ? 0 : at_most(lane * (size / 16) / group, groups - 1);
      *to++ = from[i * groups + found];
    }
}
