/* C ABI of the CUDA data plane: the same exchange as the CPU plane's, as kernels on the caller's stream. Everything a
 * step or a view changes lives in device memory, so a captured graph of whole steps replays across failures.
 *
 * Functions return 0 or a negative EP_E* / -errno; the sentence is in epc_last_error() of that thread. Streams are
 * cudaStream_t passed as void*. Calls on one context come from one thread at a time, except epc_stage, which may run
 * beside them (also while a graph is being captured). */
#ifndef ELASTICEP_CUDA_H
#define ELASTICEP_CUDA_H
#include "../elasticep.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { EPC_ABI_VERSION = 4, EPC_MAX_TENSORS = 64 };

/* Why a step was torn on this rank. */
enum epc_why {
  EPC_WHY_NONE = 0,
  EPC_WHY_TORN_HERE = 1,  /* by another block or call of this rank */
  EPC_WHY_PASSED_BY = 2,  /* a flag of a later step, or of this one under another view */
  EPC_WHY_PEER_LEFT = 3,  /* a leave cell */
  EPC_WHY_PEER_DEAD = 4,
  EPC_WHY_FENCED = 5,
  EPC_WHY_TIMEOUT = 6,
  EPC_WHY_ENGINE = 7,     /* epc_tear, epc_session_call_off, or a step that ended inside an exchange */
  EPC_WHY_ROOM = 8,       /* `slot` gets `rows` rows and has `room`; repeating the step would end the same way */
  EPC_WHY_LOST = 9,       /* no member holds `expert`, and the group does not serve without it */
  EPC_WHY_IDS = 10,       /* an id that is neither -1 nor an expert: `expert` */
  EPC_WHY_DISAGREE = 11,  /* `rank` is at another layer, or brings another number of tokens of replicated input */
  EPC_WHY_SEQUENCE = 12,  /* more exchanges on a channel than a step can number; repeating the step would end the same way */
  EPC_WHY_SCALES = 13,    /* packed scales are powers of two, and one that the engine brought (of token `rows`) is none */
  EPC_WHY_ENDED = 14      /* `rank` is at a later barrier: it ended this step without this exchange */
};
enum epc_step_status {
  EPC_STEP_RUN = 0,
  EPC_STEP_DOOMED = 1,    /* the view has a dead member: no step ran; enter again, the next view comes */
  EPC_STEP_TIMEOUT = 2,   /* the barrier timed out; enter again, it has the same number */
  EPC_STEP_EXPELLED = 3,  /* the others went on without this incarnation */
  EPC_STEP_NO_VIEW = 4    /* nothing is staged */
};

typedef struct epc_fault {
  uint64_t step, epoch;
  uint32_t why, phase, exchange, rank; /* phase: 1 barrier, 2 dispatch, 3 combine; rank: whom it is about */
  uint32_t layer, expert, slot, rows, room, pad; /* where `why` names them */
} epc_fault;

typedef struct epc_step_info {
  uint64_t epoch, step, digest, barrier_ns; /* barrier_ns: time the barrier took */
  uint32_t status, members, complete, ended;  /* members: how many; 0 when no step runs */
  uint32_t incarnation[EP_MAX_RANKS];
  uint32_t tokens[EP_MAX_RANKS];
  uint64_t work, settled; /* agreed completion, as in ep_step_info; local: 0, 0 */
} epc_step_info;

typedef struct epc_config {
  ep_geometry geometry;
  uint32_t rank, incarnation, device;
  uint32_t ranks_on_device; /* ranks whose kernels share this GPU: grids are capped so that all make progress */
  uint32_t num_sms;         /* SMs that a kernel may take; 0 = the formula */
  uint32_t count_loads;     /* 1: count the load of every expert when a step completes */
  uint32_t pinned_plan;     /* 0 automatic; 1 vector stores and loads; 2 bulk copies (measurements); bits of epc_tuning */
  uint32_t reserved[9];
} epc_config;

/* Above the plan in `pinned_plan`, for measurements: what a run on two cards compares. */
enum epc_tuning {
  EPC_TUNE_UNFUSED = 1 << 8,   /* small expanded batches as separate kernels */
  EPC_TUNE_VIA_REGION = 1 << 9, /* large expanded batches: own rows take the way of the others' */
  EPC_TUNE_WIDE = 1 << 10,     /* small batches: a thread per 16 bytes of a row in dispatch (up to 768), instead of one per 32 */
  EPC_TUNE_WIDE_SUMS = 1 << 11, /* the same where outputs are summed */
  EPC_TUNE_PUSHERS = 16,       /* shift: of 256 blocks, how many keep the link busy in large expanded dispatches; 0: 64 */
  EPC_TUNE_PULLERS = 24        /* shift: likewise in combines; 0: 150 */
};

typedef struct epc_context epc_context;

/* What an exchange hands to the expert kernel; device pointers, fixed for the life of the context. */
typedef struct epc_received {
  void* rows;             /* routed: [max_ranks * source_rows, hidden]; else the expanded rows */
  void* scales;           /* or NULL */
  int32_t* ids;           /* [max_ranks * source_rows, topk] local slot or -1 */
  float* weights;         /* [max_ranks * source_rows, topk] */
  int32_t* slot_counts;   /* [slots], or [1] rows that arrived; NULL for routed */
  int32_t* slot_offsets;  /* contiguous: [slots + 1], else NULL */
  void* out;              /* where the expert kernel writes */
  uint64_t rows_count, source_rows, row_bytes, scale_bytes, out_rows, out_row_bytes;
  int32_t* places;        /* contiguous, masked: [max_ranks * source_rows, topk] row of each pair, -1 = none */
  int32_t* row_slots;     /* contiguous: [rows_count] local slot of each row, -1 = padding */
  const void* arrivals;   /* [max_ranks] of 64 bytes: at 8 tokens, at 12 layer (u32), at 16 global scale (float) of each source */
  uint64_t id_rows;       /* rows of ids, weights and places */
  uint64_t scale_lead;    /* scale layouts other than rows, as in ep_received */
  uint32_t scale_columns, out_dtype; /* out: the combine dtype, bf16 where that is fp8 */
} epc_received;

/* What a dispatch with cpu_sync delivered. */
typedef struct epc_counts {
  uint64_t rows;     /* exact rows: contiguous up to the end of the last run, arrival the rows that came */
  uint64_t arrived;  /* rows that came */
  uint32_t torn, pad;
} epc_counts;

typedef struct epc_dispatch_args {
  uint32_t exchange, channel, layer, tokens;
  uint32_t x_dtype;       /* ep_dtype of x: the exchange's dispatch dtype (with x_scales if it has scales) or fp32/fp16/bf16 */
  uint32_t ids_bytes;     /* 4 or 8 */
  const void* x;          /* [tokens, hidden], 16-byte aligned */
  const void* x_scales;   /* rows that are quantised already, else NULL */
  const void* ids;        /* [tokens, topk] logical experts or -1 */
  const float* weights;   /* [tokens, topk] or NULL (ones) */
  uint8_t* lost;          /* [tokens] 1 = needs an expert without a live copy; or NULL */
  float global_scale;     /* nvfp4: value = element * scale * this; 0 = 1 */
  uint32_t pad;
} epc_dispatch_args;

/* Text of the last error of this thread. */
EP_API const char* epc_last_error(void);
EP_API uint32_t epc_abi_version(void);
/* name: "config", "step_info", "received", "dispatch_args", "fault", "counts", "weights", "copied". 0 if unknown. */
EP_API uint64_t epc_struct_size(const char* name);
/* Devices of this host; EP_EUSAGE with the reason when there is no driver or no device. */
EP_API int epc_device_count(uint32_t* count);

/* Bytes of a rank's data region on a GPU (ep_layout's data and the GPU parts behind it). */
EP_API int epc_region_bytes(const ep_geometry* geometry, uint64_t* bytes);
/* A zeroed VMM allocation on `device`, exported as a POSIX fd that alone keeps it alive. Returns the fd. */
EP_API int epc_region_create(const ep_geometry* geometry, uint32_t device);

/* Maps the own region and the header (ep_header_format), reserves address space for all ranks, allocates everything
 * that steps will use, and holds the header's runner lock while `hold` is 1. fds stay the caller's. */
EP_API int epc_context_create(const epc_config* config, int data_fd, int header_fd, uint32_t hold, epc_context** out);
EP_API void epc_context_destroy(epc_context* context);
/* Maps a peer's region; its address never changes, and a dropped peer's may be mapped anew. */
EP_API int epc_peer_map(epc_context* context, uint32_t rank, int data_fd);
EP_API int epc_peer_drop(epc_context* context, uint32_t rank);
/* Writes the view's bank (epoch mod 4) and makes it visible to the next barrier. All members must be mapped. */
EP_API int epc_stage(epc_context* context, const ep_view* view);
/* The same from a bank image (ep_bank_write). */
EP_API int epc_stage_bank(epc_context* context, const void* image, uint64_t bytes);

EP_API int epc_step_begin(epc_context* context, uint32_t tokens, void* stream);
EP_API int epc_step_end(epc_context* context, void* stream);
EP_API int epc_dispatch(epc_context* context, const epc_dispatch_args* args, void* stream);
EP_API int epc_dispatch_send(epc_context* context, const epc_dispatch_args* args, void* stream);
EP_API int epc_dispatch_recv(epc_context* context, const epc_dispatch_args* args, void* stream);
EP_API int epc_combine(epc_context* context, uint32_t exchange, uint32_t channel, uint32_t tokens, void* out, uint32_t out_dtype,
                       void* stream);
EP_API int epc_combine_send(epc_context* context, uint32_t exchange, uint32_t channel, void* stream);
EP_API int epc_combine_recv(epc_context* context, uint32_t exchange, uint32_t channel, uint32_t tokens, void* out, uint32_t out_dtype,
                            void* stream);
EP_API int epc_received_of(epc_context* context, uint32_t exchange, uint32_t channel, epc_received* out);
/* Puts on the stream: counts [slots], device memory, becomes how many rows the last dispatch brought to each slot, as its ids
 * say. For layouts whose kernels do not count (epc_received.slot_counts); may be captured. */
EP_API int epc_count_slots(epc_context* context, uint32_t exchange, uint32_t channel, int32_t* counts, void* stream);
/* Waits on the host for the exact count of the last dispatch of an exchange with cpu_sync; its kernels end by arrival or
 * because the step is torn (out->torn). EP_EUSAGE: the exchange has no cpu_sync, nothing was dispatched, or the stream of
 * the dispatch is being captured. */
EP_API int epc_wait_counts(epc_context* context, uint32_t exchange, uint32_t channel, epc_counts* out);
/* Tears the running step for all, in stream order. */
EP_API int epc_tear(epc_context* context, void* stream);

/* How rows move (epc_config.pinned_plan, with bits of epc_tuning) and how many SMs a kernel may take, from the next launch on. */
EP_API int epc_tune(epc_context* context, uint32_t pinned_plan, uint32_t num_sms);

/* The last barrier and step end that the stream has executed; the caller has synchronised the stream. */
EP_API int epc_step_result(epc_context* context, epc_step_info* info, epc_fault* fault);
/* Device address of a u32: 1 when the last ended step was complete. */
EP_API int epc_complete_flag(epc_context* context, void** device_pointer);
/* [layers][experts] since the start; synchronises the device. */
EP_API int epc_loads(epc_context* context, uint64_t* loads);

/* ---- session: a seat of a daemon under inline launch ------------------------------------------------------------ */
typedef struct epc_session epc_session;
enum epc_wait { EPC_WAIT_BEGUN = 0, EPC_WAIT_ENDED = 1 };

/* The rank's arena of expert weights in host memory (elasticep.weights.ArenaLayout). Tensor t of a layer's slot lies at
 * data_offset + layer * layer_bytes + offset[t] + slot * bytes[t]. */
typedef struct epc_weights {
  int32_t arena_fd;       /* for reading; stays the caller's */
  uint32_t layers, slots, tensors;
  uint64_t digest, total_bytes, labels_offset, data_offset, layer_bytes;
  uint64_t offset[EPC_MAX_TENSORS], bytes[EPC_MAX_TENSORS]; /* bytes: of one expert's tensor */
} epc_weights;

/* What was copied from the arena to the GPU, and how long that took. */
typedef struct epc_copied {
  uint64_t slots, bytes, ns;
} epc_copied;

/* Shows the ticket, maps the rank's memory on the GPU that holds it, allocates everything that steps will use, takes both
 * of the seat's locks, and starts the threads that stage views and report their adoption. num_sms 0: the formula. With
 * `weights` (else NULL) the GPU also holds the tensors of that arena: before a view is staged, whatever it names is copied. */
EP_API int epc_session_open(const char* socket_path, const char* ticket, uint32_t timeout_ms, uint32_t num_sms, const epc_weights* weights,
                            epc_session** out);
/* Waits for the device and gives everything back. */
EP_API void epc_session_close(epc_session* session);
/* Its context, for the calls above; epc_peer_* and epc_stage* are the session's own business. */
EP_API epc_context* epc_session_context(epc_session* session);
/* What the group's sizes are, and the device that holds the rank's memory. */
EP_API int epc_session_geometry(epc_session* session, ep_geometry* out, uint32_t* device);
EP_API int epc_session_status(epc_session* session, ep_status* out);
/* As ep_session_fenced: 1 if fenced, else 0. */
EP_API int epc_session_fenced(epc_session* session, uint64_t* epoch, char* text, uint64_t text_size);
EP_API int epc_session_warmup(epc_session* session, uint32_t on);
/* What is done about lost experts now: EP_POLICY_*. */
EP_API int epc_session_policy(epc_session* session, uint32_t* policy);
/* As ep_session_slots. */
EP_API int epc_session_slots(epc_session* session, uint64_t epoch, int32_t* slot_expert);
/* Returns when a view later than `after` is staged; EP_EFENCED, or EP_ETIMEOUT after timeout_ms (0: step_timeout). Until a
 * rank has run its first view it counts from here on as waiting at the barrier. EP_EINTR every 50 ms, for the caller's
 * signals: call with `again` = 1 to go on. */
EP_API int epc_session_enter(epc_session* session, uint64_t after, uint32_t timeout_ms, uint32_t again);
/* epc_step_begin with a limit of its own (0: the group's); EP_EFENCED. */
EP_API int epc_session_step_begin(epc_session* session, uint32_t tokens, uint32_t timeout_ms, void* stream);
/* The engine gives up the step whose barrier epc_session_step_begin put on a stream last: the waits of its kernels end at
 * once and tear it for all, though an epc_tear could only be put behind them. Call this, then epc_tear, then epc_step_end. */
EP_API int epc_session_call_off(epc_session* session);
/* For a caller that was interrupted and does not know what it has put on streams: waits until all of it has run, ends a step
 * whose barrier has run without an end, torn, on `stream`; *steps: how many barriers of this session have run, and as many ends. */
EP_API int epc_session_recount(epc_session* session, void* stream, uint64_t* steps);
/* Waits until epc_wait_counts would not. EP_EINTR every 50 ms: call again. */
EP_API int epc_session_await_counts(epc_session* session, uint32_t exchange, uint32_t channel);
/* Waits until `count` barriers (or step ends) of this session have run, counted from 1, replays of a graph included. `stream`
 * is the one that they are on: EP_EUSAGE if it ends or fails without. EP_EINTR every 50 ms: call again. */
EP_API int epc_session_wait(epc_session* session, uint32_t what, uint64_t count, void* stream);
/* Device address of [layers][slots] int32: the expert in each of this rank's slots in the running view, -1 = empty. It stays;
 * the barrier kernel that adopts a view changes what it holds. */
EP_API int epc_session_slot_experts(epc_session* session, void** device_pointer);
/* Device address of the tensors, from what is data_offset in the arena on. It stays. */
EP_API int epc_session_weights(epc_session* session, void** device_pointer);
/* The expert that lies whole in each slot of a layer on the GPU, -1: none. */
EP_API int epc_session_weights_held(epc_session* session, uint32_t layer, int32_t* experts);
EP_API int epc_session_weights_copied(epc_session* session, epc_copied* out);

#ifdef __cplusplus
}
#endif
#endif
