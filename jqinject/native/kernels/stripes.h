/* Scales and zero points as the kernels for AVX-512 read them; see stripes.c. */
#ifndef JQINJECT_STRIPES_H
#define JQINJECT_STRIPES_H

#include "product.h"

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

/* Their numbers, written to `to`, which holds STRIPE * stripe_stride(p). */
HIDDEN group_numbers read_stripe(const product* p, given_numbers from, stripe_order order, stripe s, float* to);

/* The same of all groups, as a kernel reads them whose lanes are parts of a step of one column. */
static inline group_numbers stripe_of(const product* p, given_numbers from, int64_t column, int64_t columns, float* to) {
  const stripe_order order = p->groups_a_step == 0 ? GROUP_BY_GROUP : COLUMN_BY_COLUMN;
  return read_stripe(p, from, order, (stripe){column, columns, 0, p->groups}, to);
}

static inline group_numbers from_column(group_numbers n, int64_t column) {
  return (group_numbers){n.first == NULL ? NULL : n.first + column * n.column, n.group, n.column};
}

#endif
