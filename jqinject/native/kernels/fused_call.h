/* A product of bytes with a prologue and an epilogue; see fused_call.c. */
#ifndef JQINJECT_FUSED_CALL_H
#define JQINJECT_FUSED_CALL_H

#include "operands.h"

/* Reads the operands of a call; 0 if they are not what it takes. */
HIDDEN int read_fused_call(work* w, fused_call* fused, const ffi_call_frame* call);

/* Makes lhs of the input; 0 without memory. */
HIDDEN int run_prologue(work* w, int64_t threads);

/* Makes the results of the sums of a block. */
HIDDEN void run_epilogue(const work* w, const block* b);

HIDDEN void free_fused_call(fused_call* fused);

#endif
