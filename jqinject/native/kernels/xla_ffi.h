/* The part of XLA's foreign function interface that a handler for CPUs needs.
 *
 * XLA keeps this binary interface stable: within a major version fields are only appended, and every struct begins with
 * its size. Declared here, so that nothing of JAX is needed where the kernels are compiled. The full declaration comes
 * with jaxlib: xla/ffi/api/c_api.h in jax.ffi.include_dir().
 */
#ifndef JQINJECT_XLA_FFI_H
#define JQINJECT_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum { FFI_MAJOR = 0, FFI_MINOR = 3, FFI_EXTENSION_METADATA = 1, FFI_INVALID_ARGUMENT = 3, FFI_S8 = 2, FFI_S32 = 4 };
enum { FFI_U8 = 6, FFI_F32 = 11, FFI_BF16 = 16, FFI_F8E4M3FN = 20, FFI_F8E8M0FNU = 33 };

typedef struct ffi_error ffi_error;
typedef struct ffi_context ffi_context;

typedef struct ffi_extension {
  size_t struct_size;
  int type;
  struct ffi_extension* next;
} ffi_extension;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  int major_version, minor_version;
} ffi_version;

typedef struct {
  size_t struct_size;
  ffi_version api_version;
  uint32_t traits;
} ffi_metadata;

typedef struct {
  ffi_extension base;
  ffi_metadata* metadata;
} ffi_metadata_extension;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
} ffi_buffer;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  int64_t size;
  int* types;
  ffi_buffer** buffers;
} ffi_buffers;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  const char* message;
  int code;
} ffi_error_args;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  ffi_error* error;
} ffi_destroy_args;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  ffi_context* context;
  void (*task)(void*);
  void* data;
} ffi_schedule_args;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  ffi_context* context;
  int64_t* threads;
} ffi_threads_args;

typedef void (*ffi_unused)(void);

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  ffi_version api_version;
  const void* internal;
  ffi_error* (*error_create)(ffi_error_args*);
  ffi_unused error_get_message;
  void (*error_destroy)(ffi_destroy_args*);
  ffi_unused handler_register, stream_get, type_register, context_get, state_set, state_get, memory_allocate,
      memory_free;
  ffi_error* (*schedule)(ffi_schedule_args*);
  ffi_error* (*threads)(ffi_threads_args*);
} ffi_api;

typedef struct {
  size_t struct_size;
  ffi_extension* extensions;
  const ffi_api* api;
  ffi_context* context;
  int stage;
  ffi_buffers args, results;
} ffi_call_frame;

#endif
