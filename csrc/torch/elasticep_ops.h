/* C ABI between Python and the torch operators: which exchange an operator's number stands for, and what its operators did.
 *
 * The operators call the core or the CUDA library through addresses that Python took from the library it has loaded, so
 * this library needs neither of them to load and no build of it depends on CUDA. */
#ifndef ELASTICEP_OPS_H
#define ELASTICEP_OPS_H
#include "../cuda/elasticep_cuda.h"
#include "../elasticep.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { EPT_ABI_VERSION = 2, EPT_NAME = 64, EPT_TEXT = 512 };
enum ept_plane { EPT_CPU = 1, EPT_CUDA = 2 };

/* Of the interpreter: PyGILState_Ensure and _Release, PyErr_CheckSignals, _Fetch and _Restore, Py_DecRef. */
typedef struct ept_python {
  int (*ensure)(void);
  void (*release)(int state);
  int (*check_signals)(void);
  void (*fetch)(void** kind, void** error, void** trace);
  void (*restore)(void* kind, void* error, void* trace);
  void (*drop)(void* object);
} ept_python;

typedef struct ept_cpu_calls {
  int (*send)(ep_session*, uint32_t, uint32_t, uint32_t, const ep_rows*, const void*, uint32_t, const float*, uint32_t);
  int (*receive)(ep_session*, uint32_t, uint32_t, ep_received*, uint8_t*);
  int (*combine)(ep_session*, uint32_t, uint32_t, void*, uint32_t);
  const char* (*last_error)(void);
  const ept_python* python; /* copied; NULL: handlers of signals run when an operator has ended */
} ept_cpu_calls;

typedef struct ept_cuda_calls {
  int (*dispatch)(epc_context*, const epc_dispatch_args*, void*);
  int (*combine)(epc_context*, uint32_t, uint32_t, uint32_t, void*, uint32_t, void*);
  int (*tune)(epc_context*, uint32_t, uint32_t);
  int (*received_of)(epc_context*, uint32_t, uint32_t, epc_received*);
  const char* (*last_error)(void);
  int32_t (*stream)(int32_t device, void** stream); /* torch's aoti_torch_get_current_cuda_stream */
} ept_cuda_calls;

typedef struct ept_exchange {
  void* rank;        /* ep_session or epc_context */
  const void* calls; /* ept_cpu_calls or ept_cuda_calls; copied */
  uint32_t* sms;     /* CUDA: how many SMs the context was told last; shared with whoever else tells it */
  uint32_t plane;
  int32_t device; /* index of the GPU, -1: tensors are on the CPU */
  uint32_t number, channels, layers, ranks, max_tokens, topk, hidden, slots, num_sms;
  uint32_t wire;        /* ep_dtype of rows on the wire */
  uint32_t block;       /* elements per scale, 0: rows are not quantised */
  uint32_t float_scale; /* 1: scales are fp32, 0: bytes */
  uint32_t width;       /* elements of a quantised row: hidden, nvfp4 hidden / 2 */
  uint32_t by_column;   /* 1: scales are column-major words */
  uint64_t row_bytes, scale_bytes, out_bytes; /* of a row on the wire, of its scales, of a row of `out` */
  char name[EPT_NAME];
} ept_exchange;

/* What operators of an exchange did since it was asked last. */
typedef struct ept_taken {
  int32_t code;  /* of the last call that failed, 0: none did */
  uint32_t open; /* channels, as bits, whose last dispatch no combine followed */
  char text[EPT_TEXT];
} ept_taken;

EP_API uint32_t ept_abi_version(void);
EP_API uint64_t ept_struct_size(const char* name); /* "exchange", "taken", "cpu_calls", "cuda_calls", "python"; 0 if unknown */
/* The number that operators know it by, > 0. Negative: what received_of returned. */
EP_API int64_t ept_exchange_open(const ept_exchange* exchange);
EP_API void ept_exchange_close(int64_t key);
/* 1 and *out, if operators ran; 0: none did, or nobody has this number. tokens [channels][layers]: of the last dispatch of
 * each, -1 = none. */
EP_API int ept_exchange_take(int64_t key, ept_taken* out, int32_t* tokens);

/* For a caller that holds the interpreter's lock: raises there what a handler of a signal raised while an operator of this
 * exchange waited, which then ended with EP_EINTR. 0: nothing. */
EP_API int ept_exchange_raise(int64_t key);

#ifdef __cplusplus
}
#endif
#endif
