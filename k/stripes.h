/* Scales and zero points as the kernels in vectors read them, STRIPE columns at a time; see stripes.c. */
#ifndef JQINJECT_STRIPES_H
#define JQINJECT_STRIPES_H

#include "vectors.h"

#if defined(__x86_64__)

enum { STRIPE = LANES };

/* Of some columns, and the distances from group to group and from column to column. */
typedef struct {
  const float* first; /* NULL for no zero points */
  int64_t group, column;
} group_numbers;

/* Numbers from column to column: SPARE zeros follow the groups, which are read and multiplied by 0. */
static inline int64_t stripe_stride(const product* p) { return parts(p->groups + SPARE, 16) * 16; }

/* How the numbers of a stripe lie: STRIPE of each group side by side, or the groups of a column. */
typedef enum { COLUMN_BY_COLUMN, GROUP_BY_GROUP } stripe_order;

/* Up to STRIPE columns, and which of their groups. */
typedef struct {
  int64_t column, columns, group, groups;
} stripe;

/* Their numbers: where they lie, or written to `to`, which holds STRIPE * stripe_stride(p). */
#define read_stripe NAMED(read_stripe)
HIDDEN group_numbers read_stripe(const product* p, given_numbers from, stripe_order order, stripe s, float* to);

/* The same of all groups, as a kernel reads them whose lanes are parts of a step of one column. */
static inline group_numbers stripe_of(const product* p, given_numbers from, int64_t column, int64_t columns, float* to) {
  const stripe_order order = p->groups_a_step == 0 ? GROUP_BY_GROUP : COLUMN_BY_COLUMN;
  return read_stripe(p, from, order, (stripe){column, columns, 0, p->groups}, to);
}

static inline group_numbers from_column(group_numbers n, int64_t column) {
  return (group_numbers){n.first == NULL ? NULL : n.first + column * n.column, n.group, n.column};
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
INLINED ivec groups_of_lanes(const product* p) {
  return V(srl_epi32)(lane_numbers(), _mm_cvtsi32_si128((int)p->lanes_shift));
}

/* The numbers of a column's groups, one for each lane of a step whose first group is `first`. */
INLINED fvec of_lanes(const int whole_steps, group_numbers n, int64_t column, int64_t first, ivec places) {
  if (whole_steps) return V(set1_ps)(n.first[first * n.group + column]);
  return permuted(V(loadu_ps)(n.first + column * n.column + first), places);
}

/* The group of vector n, of LANES numbers, of a step of bytes. */
INLINED int64_t group_of_vector(const product* p, int64_t first, int n) {
  return p->groups_a_step == 0 ? first : first + (LANES / 4 * n >> p->lanes_shift);
}

#endif
#endif
