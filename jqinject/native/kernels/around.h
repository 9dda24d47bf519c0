/* What is computed around a product of bytes; see around.c. */
#ifndef JQINJECT_AROUND_H
#define JQINJECT_AROUND_H

#include "operands.h"

/* Reads the operands of a call; 0 if they are not what it takes. */
HIDDEN int read_surroundings(work* w, surroundings* around, const ffi_call_frame* call);

/* Makes lhs of what is given; 0 without memory. */
HIDDEN int make_lhs(work* w, int64_t threads);

/* Makes the results of the sums of a block. */
HIDDEN void finish_block(const work* w, const block* b);

HIDDEN void free_surroundings(surroundings* around);

#endif
