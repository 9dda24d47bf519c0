/* Calls the kernels as XLA does, for test_neon.py: calls are read from stdin, their results written to stdout.
 *
 * A call is int64 numbers: the function, the number of operands, and dtype, rank and sizes of each operand and of the
 * result. The bytes of an operand follow its sizes. First in stdout is an int32: the features that the library finds.
 *
 * Each call is made twice: its operands and its result begin right after a page that cannot be accessed, then end right
 * before one.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "xla_ffi.h"

typedef ffi_error* function(ffi_call_frame* call);
extern function jqinject_int8_matmul, jqinject_int4_matmul, jqinject_group_matmul, jqinject_float_matmul;
extern function jqinject_fused_matmul, jqinject_row_amax, jqinject_three_bits;
extern int jqinject_cpu_features(void);

static function* const functions[] = {jqinject_int8_matmul, jqinject_int4_matmul, jqinject_group_matmul,
                                      jqinject_float_matmul, jqinject_fused_matmul, jqinject_row_amax,
                                      jqinject_three_bits};
enum { MOST_OPERANDS = 16 };

static _Noreturn void fail(const char* message) {
  fprintf(stderr, "%s\n", message);
  exit(1);
}

static ffi_error* create_error(ffi_error_args* args) { fail(args->message); }

static ffi_error* two_threads(ffi_threads_args* args) {
  *args->threads = 2;
  return NULL;
}

static void read_bytes(void* to, size_t size) {
  if (size && fread(to, size, 1, stdin) != 1) fail("the input ends within a call");
}

static int64_t read_number(void) {
  int64_t number;
  read_bytes(&number, sizeof(number));
  return number;
}

static char* memory_at_edge(size_t size, int at_end) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), inside = (size + page - 1) / page * page;
  char* memory = mmap(NULL, inside + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("no memory");
  if (inside && mprotect(memory + page, inside, PROT_READ | PROT_WRITE)) fail("no access to memory");
  return memory + page + (at_end ? inside - size : 0);
}

/* An operand or a result, in both places; returns its bytes. */
static size_t read_buffer(ffi_buffer* begins, ffi_buffer* ends) {
  begins->struct_size = sizeof(*begins);
  begins->dtype = (int)read_number();
  begins->rank = read_number();
  begins->dims = malloc((size_t)begins->rank * sizeof(int64_t));
  size_t size = begins->dtype == FFI_F32 || begins->dtype == FFI_S32 ? 4 : begins->dtype == FFI_BF16 ? 2 : 1;
  for (int64_t axis = 0; axis < begins->rank; axis++) size *= (size_t)(begins->dims[axis] = read_number());
  *ends = *begins;
  begins->data = memory_at_edge(size, 0);
  ends->data = memory_at_edge(size, 1);
  return size;
}

static void call(int64_t number) {
  static const ffi_api api = {.struct_size = sizeof(api), .error_create = create_error, .threads = two_threads};
  ffi_buffer buffers[2][MOST_OPERANDS + 1], *pointers[2][MOST_OPERANDS + 1];
  const int64_t operands = read_number();
  size_t size = 0;
  for (int64_t n = 0; n <= operands; n++) {
    size = read_buffer(&buffers[0][n], &buffers[1][n]);
    for (int place = 0; place < 2; place++) pointers[place][n] = &buffers[place][n];
    if (n == operands) break;
    read_bytes(buffers[0][n].data, size);
    memcpy(buffers[1][n].data, buffers[0][n].data, size);
  }
  for (int place = 0; place < 2; place++) {
    ffi_call_frame frame = {.struct_size = sizeof(frame),
                            .api = &api,
                            .args = {.size = operands, .buffers = pointers[place]},
                            .results = {.size = 1, .buffers = pointers[place] + operands}};
    functions[number](&frame);
  }
  if (memcmp(buffers[0][operands].data, buffers[1][operands].data, size)) fail("the result depends on where memory is");
  fwrite(buffers[0][operands].data, 1, size, stdout);
}

int main(void) {
  const int32_t features = jqinject_cpu_features();
  fwrite(&features, sizeof(features), 1, stdout);
  for (int64_t number; fread(&number, sizeof(number), 1, stdin) == 1;) call(number);
  return 0;
}
