/* What every function that XLA calls needs of the call. */
#ifndef JQINJECT_HANDLER_H
#define JQINJECT_HANDLER_H

#include "xla_ffi.h"

/* Whether XLA only asks which version of its interface the handler is for, and the answer. */
static inline int is_about_version(const ffi_call_frame* call) {
  if (call->extensions == NULL || call->extensions->type != FFI_EXTENSION_METADATA) return 0;
  ffi_metadata* metadata = ((ffi_metadata_extension*)call->extensions)->metadata;
  metadata->api_version.major_version = FFI_MAJOR;
  metadata->api_version.minor_version = FFI_MINOR;
  return 1;
}

static inline ffi_error* refuse(const ffi_call_frame* call, const char* message) {
  ffi_error_args args = {sizeof(args), NULL, message, FFI_INVALID_ARGUMENT};
  return call->api->error_create(&args);
}

/* The threads that XLA has for this call. */
static inline int64_t threads_of(const ffi_call_frame* call) {
  int64_t threads = 1;
  ffi_threads_args args = {sizeof(args), NULL, call->context, &threads};
  ffi_error* error = call->api->threads(&args);
  if (error == NULL) return threads;
  ffi_destroy_args destroy = {sizeof(destroy), NULL, error};
  call->api->error_destroy(&destroy);
  return 1;
}

#endif
