/* One job on several threads. */
#ifndef JQINJECT_THREADS_H
#define JQINJECT_THREADS_H

#include <stdint.h>

#include "product.h"

typedef void part_of_job(void* job, int64_t number, uint8_t* scratch);

/* Calls `part` for 0 ... count - 1, on this thread and up to threads - 1 others. 0 without memory. */
HIDDEN int share(part_of_job* part, void* job, int64_t count, int64_t threads);

#endif
