/* One job on several threads: the thread that calls, and helpers that were started by the first job that is worth it.
 *
 * To wake a thread takes longer than the product of one row, and a model's layers follow each other closely. So after a
 * job a helper goes on looking for the next one for a short time, giving way to whoever wants the processor, and only
 * then sleeps. There is one job at a time: a thread that finds the helpers taken computes alone. The parts of a job are
 * taken one by one, so that a helper that comes late is not waited for.
 */
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#if defined(__x86_64__)
#define REST() __builtin_ia32_pause()
#else
#define REST() atomic_signal_fence(memory_order_seq_cst)
#endif

enum { HELPERS = 63, LOOKS = 100, RESTS = 16 };

static struct {
  atomic_flag taken;           /* by the thread whose job it is */
  atomic_int open, inside;     /* whether there is a job; helpers that look at it */
  atomic_uint round;           /* how many jobs there were */
  atomic_llong next, finished; /* parts */
  atomic_int asleep;
  part_of_job* part;
  void* job;
  int64_t count;
  int started;
  pthread_mutex_t lock; /* of those asleep */
  pthread_cond_t wake;
} pool = {.taken = ATOMIC_FLAG_INIT, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* A thread keeps its memory from call to call: to get it from the system costs more than a small product. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_of_thread;

/* Threads do not survive a fork: the child has none. */
static void forget_helpers(void) {
  pool.started = 0;
  atomic_store(&pool.open, 0), atomic_store(&pool.inside, 0), atomic_store(&pool.asleep, 0);
  atomic_flag_clear(&pool.taken);
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.wake, NULL);
}

static void prepare(void) {
  pthread_key_create(&scratch_of_thread, free);
  pthread_atfork(NULL, NULL, forget_helpers);
}

static uint8_t* scratch_memory(void) {
  pthread_once(&once, prepare);
  uint8_t* scratch = pthread_getspecific(scratch_of_thread);
  if (scratch != NULL) return scratch;
  scratch = aligned_alloc(ALIGNMENT, SCRATCH);
  if (scratch != NULL) pthread_setspecific(scratch_of_thread, scratch);
  return scratch;
}

static void take_parts(uint8_t* scratch) {
  for (int64_t i; (i = atomic_fetch_add(&pool.next, 1)) < pool.count; atomic_fetch_add(&pool.finished, 1))
    pool.part(pool.job, i, scratch);
}

/* Until there was another job than `seen`. */
static void wait_for_job(unsigned seen) {
  for (int look = 0; look < LOOKS; look++, sched_yield())
    for (int rest = 0; rest < RESTS; rest++, REST())
      if (atomic_load(&pool.round) != seen) return;
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add(&pool.asleep, 1);
  while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
  atomic_fetch_sub(&pool.asleep, 1);
  pthread_mutex_unlock(&pool.lock);
}

static void* help(void* unused) {
  (void)unused;
  uint8_t* scratch = scratch_memory();
  if (scratch == NULL) return NULL;
  for (unsigned seen = 0;;) {
    wait_for_job(seen);
    seen = atomic_load(&pool.round);
    atomic_fetch_add(&pool.inside, 1);
    if (atomic_load(&pool.open)) take_parts(scratch);
    atomic_fetch_sub(&pool.inside, 1);
  }
}

static void start_helpers(int64_t wanted) {
  for (pthread_t thread; pool.started < at_most(wanted, HELPERS); pool.started++) {
    if (pthread_create(&thread, NULL, help, NULL) != 0) return;
    pthread_detach(thread);
  }
}

static void wake_helpers(void) {
  if (atomic_load(&pool.asleep) == 0) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
}

/* Until something is so; a helper may have lost the processor meanwhile. */
#define AWAIT(condition) \
  for (int rests = 1; !(condition); rests++) rests % 1024 ? (void)REST() : (void)sched_yield()

int share(part_of_job* part, void* job, int64_t count, int64_t threads) {
  uint8_t* scratch = scratch_memory();
  if (scratch == NULL) return 0;
  if (count < 2 || threads < 2 || atomic_flag_test_and_set(&pool.taken)) {
    for (int64_t i = 0; i < count; i++) part(job, i, scratch);
    return 1;
  }
  start_helpers(at_most(threads, count) - 1);
  AWAIT(atomic_load(&pool.inside) == 0); /* those who came too late for the last job */
  pool.part = part, pool.job = job, pool.count = count;
  atomic_store(&pool.next, 0), atomic_store(&pool.finished, 0);
  atomic_store(&pool.open, 1);
  atomic_fetch_add(&pool.round, 1);
  wake_helpers();
  take_parts(scratch);
  AWAIT(atomic_load(&pool.finished) == count);
  atomic_store(&pool.open, 0);
  atomic_flag_clear(&pool.taken);
  return 1;
}
