/* Scales and zero points as the kernels for AVX-512 read them; see stripes.c. */
#ifndef JQINJECT_STRIPES_H
#define JQINJECT_STRIPES_H

#include "product.h"

/* Of some columns, and the distances from group to group and from column to column. */
typedef struct {
  const float* first; /* NULL for no zero points */
  int64_t group, column;
} group_numbers;

/* Numbers from column to column, where steps have several groups: SPARE zeros follow, which are read and multiplied by
 * 0. */
static inline int64_t stripe_stride(const product* p) { return parts(p->groups + SPARE, 16) * 16; }

/* Those of up to STRIPE columns, written to `to`, which holds STRIPE * stripe_stride(p). */
HIDDEN group_numbers stripe_of(const product* p, given_numbers from, int64_t column, int64_t columns, float* to);

static inline group_numbers from_column(group_numbers n, int64_t column) {
  return (group_numbers){n.first == NULL ? NULL : n.first + column * n.column, n.group, n.column};
}

#endif
