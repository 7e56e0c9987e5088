/* The C ABI of the native core. Python loads it with ctypes (elasticep/native), so every struct here has fixed-width
 * fields only and a mirror there; ep_abi_version() and ep_struct_size() let the two sides check each other.
 *
 * Functions that can fail return 0 or a negative EP_E* / -errno; the sentence is in ep_last_error() of that thread.
 * "inc" is a seat's incarnation (>= 1; 0 = nobody). Times are CLOCK_MONOTONIC nanoseconds unless a name says ms. */
#ifndef ELASTICEP_H
#define ELASTICEP_H
#include <stdint.h>
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
#define EP_API __attribute__((visibility("default")))

enum {
  EP_ABI_VERSION = 1,
  EP_MAX_RANKS = 128,
  EP_MAX_TOPK = 32,
  EP_MAX_EXCHANGES = 8,
  EP_MAX_CHANNELS = 2,
  EP_BANKS = 4,
  EP_TEXT = 256
};

enum ep_error {
  EP_EINVAL = -10001,    /* an argument that cannot be used */
  EP_EMISMATCH = -10002, /* layout digest, magic or ABI of another version */
  EP_EUSAGE = -10003,    /* call out of order */
  EP_ETORN = -10004,     /* the step is torn: its remaining calls return this at once */
  EP_EFENCED = -10005,   /* this incarnation was expelled */
  EP_ETIMEOUT = -10006,  /* deadline passed */
  EP_EGONE = -10007,     /* daemon or worker is gone */
  EP_ECAP = -10008,      /* more tokens than the cap */
  EP_ELOST = -10009,     /* an expert of the view has no live replica and the policy refuses */
  EP_ESHORT = -10010,    /* memory could not be reserved */
  EP_EINTR = -10011,     /* a signal may have come: the same call with the same arguments goes on waiting */
  EP_EDEVICE = -10012    /* a GPU, or this process's context on it, failed */
};

enum ep_copies { EP_COPIES_ALL = 0, EP_COPIES_PER_EXPERT = 1, EP_COPIES_PER_RANK = 2 };
enum ep_row_layout { EP_LAYOUT_ARRIVAL = 0, EP_LAYOUT_CONTIGUOUS = 1, EP_LAYOUT_MASKED = 2, EP_LAYOUT_ROUTED = 3 };
enum ep_dtype { EP_FP32 = 0, EP_FP16 = 1, EP_BF16 = 2, EP_FP8 = 3, EP_MXFP8 = 4, EP_NVFP4 = 5 };
enum ep_reduce { EP_REDUCE_PER_RANK = 0, EP_REDUCE_PER_EXPERT = 1 };
enum ep_launch { EP_LAUNCH_SERVICE = 1, EP_LAUNCH_INLINE = 2 };
/* How the scales of contiguous and masked rows are handed to the expert kernel. Columns and packed are [columns][lead]
 * of 4-byte words, word (c, r) belonging to row r; lead is a multiple of 4 words (16 bytes); masked: one such block per slot. */
enum ep_scale_layout {
  EP_SCALES_ROWS = 0,    /* as on the wire: [rows][scales of a row] */
  EP_SCALES_COLUMNS = 1, /* fp8: fp32, column-major */
  EP_SCALES_PACKED = 2   /* fp8, mxfp8: four UE8M0 bytes in an int32, column-major; fp8 scales are powers of two then */
};

typedef struct ep_exchange_config {
  uint32_t copies, layout, dispatch_dtype, combine_dtype, reduce, cpu_sync, max_tokens, channels;
  uint32_t masked_room; /* rows per slot in the masked layout, 0 = max_ranks * max_tokens */
  uint32_t replicated;  /* 1: every rank brings the same tokens; nothing is sent, every rank gets every sum */
  uint32_t scale_layout;
  uint32_t reserved[5];
} ep_exchange_config;

typedef struct ep_geometry {
  uint32_t layers, experts, topk, hidden, slots, max_ranks, exchanges, launch;
  uint32_t serve_lost; /* 1: policy `serve` */
  uint32_t agreed;     /* 1: completion is agreed on at the barriers */
  uint32_t device;     /* 0: host memory; 1: the data regions are on GPUs */
  uint32_t reserved[5];
  ep_exchange_config exchange[EP_MAX_EXCHANGES];
} ep_geometry;

typedef struct ep_timeouts {
  uint64_t suspect_after_ns, hang_timeout_ns, exchange_timeout_ns, step_timeout_ns;
} ep_timeouts;

typedef struct ep_layout_info {
  uint64_t digest, header_bytes, data_bytes, bank_bytes;
} ep_layout_info;

EP_API uint32_t ep_abi_version(void);
EP_API const char* ep_last_error(void);
/* name: "geometry", "view", "status", "message", "event", "received", "step_info", "timeouts", "rows". 0 if unknown. */
EP_API uint64_t ep_struct_size(const char* name);

/* ---- layout and memory (daemon, tests) ---------------------------------------------------------------------- */
EP_API int ep_layout(const ep_geometry* geometry, ep_layout_info* out);
/* Where the load counters lie in the data region: [layers][experts] uint64. */
EP_API int ep_layout_loads(const ep_geometry* geometry, uint64_t* offset);
/* Inline launch: the same of their copy in the header, which a rank whose data is on a GPU keeps for its daemon. */
EP_API int ep_layout_header_loads(const ep_geometry* geometry, uint64_t* offset);
/* A sealed-size memfd with all pages reserved; returns the fd. EP_ESHORT names bytes asked and available. */
EP_API int ep_memory_create(const char* name, uint64_t bytes);
/* What this thread read or wrote in shared memory before, it does before whatever it reads or writes after (an acquire and a
 * release fence), for callers whose language has none. */
EP_API void ep_memory_fence(void);
/* Writes magic, digest, rank and timeouts into a fresh header memfd. */
EP_API int ep_header_format(int header_fd, const ep_geometry* geometry, uint32_t rank, const ep_timeouts* timeouts);

/* One view's tables. incarnation[r] = 0: no member. Tables are row-major [layers][max_ranks][slots]. */
typedef struct ep_view {
  uint64_t epoch, previous_epoch; /* previous_epoch 0: the first view */
  uint64_t digest;                /* out of ep_view_digest, in for ep_bank_write (0 = compute) */
  uint32_t incarnation[EP_MAX_RANKS];
  const int32_t* slot_expert;     /* -1 = empty */
  const uint32_t* slot_weight;    /* 65536 = all of the expert's tokens */
} ep_view;
EP_API int ep_view_digest(const ep_geometry* geometry, const ep_view* view, uint64_t* digest);
/* Fills a memfd of bank_bytes (made with ep_memory_create) with the bank image that runners copy when they stage. */
EP_API int ep_bank_write(int bank_fd, const ep_geometry* geometry, const ep_view* view);

/* ---- header access (daemon) --------------------------------------------------------------------------------- */
typedef struct ep_header_map ep_header_map;
typedef struct ep_status {
  uint32_t rank, incarnation, runner_pid, engine_pid;   /* pids 0: not held */
  uint32_t fenced;                                      /* highest fenced incarnation */
  uint32_t wait_phase, wait_exchange, wait_rank;        /* phase 0 none, 1 barrier, 2 dispatch, 3 combine, 4 join: for a view */
  uint64_t wait_since_ns, progress, epoch, step, torn_steps, complete_steps;
  uint32_t warmup, pad;
  uint64_t staged[EP_BANKS];                            /* epochs in the banks, 0 = empty */
} ep_status;
EP_API ep_header_map* ep_header_open(int header_fd, uint64_t layout_digest); /* NULL: see ep_last_error */
EP_API void ep_header_close(ep_header_map* header);
EP_API int ep_header_status(ep_header_map* header, ep_status* out);
/* Gives the seat to a new incarnation: only when runner and engine of the old one are confirmed gone. */
EP_API int ep_header_grant(ep_header_map* header, uint32_t inc);
/* `dead` of `rank` := max(old, inc), and every waiter of this header wakes. */
EP_API int ep_header_mark_dead(ep_header_map* header, uint32_t rank, uint32_t inc);
/* `fenced` := max(old, inc). epoch and text tell the engine why. */
/* What the runner does about tokens that need an expert without a live copy; may change at any time. */
enum { EP_POLICY_SERVE = 1, EP_POLICY_RENORMALISE = 2 };
EP_API int ep_header_policy(ep_header_map* header, uint32_t policy);
EP_API int ep_header_fence(ep_header_map* header, uint32_t inc, uint64_t epoch, const char* text);
/* Fault injection: the runner of this header stops or kills itself at the `after`-th pass of a site from now.
 * site 0 disarms. Only daemons whose config allows it, and tests, call this. */
enum ep_failpoint {
  EP_FAIL_NONE = 0, EP_FAIL_CELLS = 1, EP_FAIL_CELLS_SENT = 2, EP_FAIL_ROWS = 3, EP_FAIL_BITMAP = 4, EP_FAIL_FLAG = 5,
  EP_FAIL_SENT = 6, EP_FAIL_RECEIVED = 7, EP_FAIL_READY = 8, EP_FAIL_READY_SENT = 9, EP_FAIL_PULL = 10, EP_FAIL_PULLED = 11,
  EP_FAIL_END = 12, EP_FAIL_STAGE = 13
};
enum ep_fail_action { EP_FAIL_KILL = 1, EP_FAIL_STOP = 2 };
EP_API int ep_header_failpoint(ep_header_map* header, uint32_t site, uint32_t action, uint32_t after);
/* How often the armed site fired since it was armed. */
EP_API uint32_t ep_header_failpoint_hits(ep_header_map* header);

/* ---- liveness (daemon): one native thread waits on robust futexes --------------------------------------------- */
typedef struct ep_watcher ep_watcher;
enum ep_event_kind { EP_EVENT_HELD = 1, EP_EVENT_DIED = 2, EP_EVENT_RELEASED = 3 };
enum ep_holder { EP_HOLDER_RUNNER = 0, EP_HOLDER_ENGINE = 1 };
typedef struct ep_event {
  uint64_t key;            /* as given to ep_watcher_watch */
  uint32_t kind, holder;   /* ep_event_kind, ep_holder */
  uint32_t pid, inc;
  uint64_t at_ns;
} ep_event;
EP_API ep_watcher* ep_watcher_new(void);
EP_API int ep_watcher_fd(ep_watcher* watcher); /* eventfd, readable when events wait */
EP_API int ep_watcher_next(ep_watcher* watcher, ep_event* out); /* 1 = filled, 0 = none */
/* Watches both locks of this header. On a death of the present incarnation the watcher itself, before any Python
 * runs, sets the dead word in every header of the same group_key and fences the header. */
EP_API int ep_watcher_watch(ep_watcher* watcher, uint64_t key, uint64_t group_key, ep_header_map* header);
EP_API int ep_watcher_unwatch(ep_watcher* watcher, uint64_t key);
/* Headers (own and peers' of the domain) that get the dead words of group_key. */
EP_API int ep_watcher_peer_add(ep_watcher* watcher, uint64_t group_key, ep_header_map* header);
EP_API int ep_watcher_peer_remove(ep_watcher* watcher, uint64_t group_key, ep_header_map* header);
/* Looks at all locks now, in the caller's thread: for one who has another sign of a death, while the watcher's own thread
 * may not have the processor. */
EP_API void ep_watcher_look(ep_watcher* watcher);
EP_API void ep_watcher_free(ep_watcher* watcher);

/* ---- messages between daemon and runner/engine, over SEQPACKET ------------------------------------------------- */
enum ep_message_type {
  EP_MSG_HELLO = 1,    /* to daemon: rank, a = role, b = pid, c = inc (reattach only), text = ticket; reattach: fds header, data */
  EP_MSG_WELCOME = 2,  /* from daemon: rank, a = inc, b = launch, c = layout digest, upper half of d = what it takes besides the
                          messages of its first version (ep_takes); fds header, data; body: ep_geometry */
  EP_MSG_REFUSED = 3,  /* from daemon: status, text */
  EP_MSG_STAGE = 4,    /* from daemon: a = epoch, b = number of peers; fds bank, then header+data per peer; body: u32 rank per peer.
                          Peers already sent on this connection need not come again; own rank never comes.
                          PEERS just before it bring those that are too many for one message. */
  EP_MSG_STAGED = 5,   /* to daemon: a = epoch, status 0 or error with text */
  EP_MSG_ADOPTED = 6,  /* to daemon: a = epoch, b = step */
  EP_MSG_QUIT = 7,     /* from daemon: leave now (worker exits, engine session is fenced by header) */
  EP_MSG_FETCH = 8,    /* peer daemon: rank, text = group */
  EP_MSG_FETCHED = 9,  /* reply: status, text; fds header, data; a = layout digest */
  EP_MSG_WEIGHTS = 10, /* reserved for weight migration */
  EP_MSG_MEMORY = 11,  /* to daemon, from the process that allocates on a GPU: status, text; fd data. Its WELCOME comes without
                          fds, d = device; an engine's has in the lower half of d the ranks whose kernels share the GPU */
  EP_MSG_PEERS = 12,   /* from daemon: a = epoch, b = number of peers, for the STAGE that follows; fds header+data per peer; body:
                          u32 rank per peer */
  EP_MSG_HEADWAY = 13  /* to daemon, if it takes it: a = epoch being staged, b = bytes of expert weights copied to the GPU for it,
                          c = bytes to be copied in all. May be lost; after the view's STAGED it means nothing. */
};
/* What a daemon takes; one that does not say so would close the connection over it. */
enum ep_takes { EP_TAKES_HEADWAY = 1 };
enum ep_role { EP_ROLE_WORKER = 1, EP_ROLE_ENGINE = 2, EP_ROLE_PEER = 3 };
enum { EP_MSG_MAGIC = 0x314d5045 };
typedef struct ep_message {
  uint32_t magic, type;
  int32_t status;
  uint32_t rank;
  uint64_t a, b, c, d;
  char text[EP_TEXT];
} ep_message;

/* ---- worker: python -m elasticep.runtime.worker --------------------------------------------------------------- */
/* Connects (ticket), maps, takes the runner lock, serves commands until told to quit or fenced. Survives a restart of
 * the daemon: reconnects to socket_path and offers its fds again. Returns 0 after QUIT, EP_EFENCED, or an error. */
EP_API int ep_worker_run(const char* socket_path, const char* ticket);

/* ---- session: what an engine holds, whatever the launch --------------------------------------------------------- */
typedef struct ep_session ep_session;
/* Set in the announced tokens when there are prompt tokens among them: any rank's makes it a prefill step for all. */
enum { EP_TOKENS_PROMPT = 0x40000000 };
typedef struct ep_step_info {
  uint64_t epoch, step, digest;
  uint32_t members, pad;
  uint32_t incarnation[EP_MAX_RANKS];
  uint32_t tokens[EP_MAX_RANKS]; /* that each member announced at the barrier, with EP_TOKENS_PROMPT */
  /* agreed completion: the work that this step runs (1, 2, ...), and the last one that is settled, so that it may be
   * released. A rank whose last complete work is `work` itself undoes it and runs it again. Local: 0, 0. */
  uint64_t work, settled;
} ep_step_info;

/* What dispatch delivered; pointers lie in the region. Rows and scales that sources write themselves (arrival, routed) are
 * there until this rank's outputs are said to be ready (combine_send), all else until the next dispatch on this channel. */
typedef struct ep_received {
  void* rows;            /* [rows_count, hidden] of the dispatch dtype; masked: [slots, room, hidden] */
  void* scales;          /* or NULL */
  int32_t* ids;          /* [id_rows, topk] local slot, -1 = none or absent row */
  float* weights;        /* [id_rows, topk] */
  int32_t* slot_counts;  /* [slots] rows per local slot */
  int32_t* slot_offsets; /* contiguous: [slots + 1] first row of each slot, else NULL */
  void* out;             /* where the expert kernel writes: [rows, hidden]; arrival and routed with per_expert [rows, topk, hidden] */
  uint64_t rows_count;   /* rows of room; exact with cpu_sync */
  uint64_t arrived;      /* rows that arrived */
  uint32_t out_dtype, row_dtype; /* out: the combine dtype, bf16 where that is fp8 */
  uint32_t tokens[EP_MAX_RANKS]; /* per source */
  uint64_t id_rows;      /* rows of ids and weights: rows_count; contiguous and masked: rows as sent, max_ranks * source rows */
  int32_t* places;       /* contiguous, masked: [id_rows, topk] row of each pair, -1 = none; else NULL */
  int32_t* row_slots;    /* contiguous: [rows_count] local slot of each row, -1 = padding; else NULL */
  uint64_t scale_lead;   /* columns, packed: words from one column to the next */
  uint32_t scale_columns, pad;
  float global_scale[EP_MAX_RANKS]; /* nvfp4, per source: value = element * scale of its block * this */
} ep_received;

EP_API int ep_session_open(const char* socket_path, const char* ticket, uint32_t timeout_ms, ep_session** out);
EP_API void ep_session_close(ep_session* session);
EP_API int ep_session_geometry(ep_session* session, ep_geometry* out);
EP_API int ep_session_status(ep_session* session, ep_status* out);
/* Why this rank was fenced: epoch and sentence. Returns 1 if fenced, else 0. */
EP_API int ep_session_fenced(ep_session* session, uint64_t* epoch, char* text, uint64_t text_size);
EP_API int ep_session_warmup(ep_session* session, uint32_t on);
/* on: a wait of ep_step_begin, ep_dispatch_recv, ep_combine, ep_combine_send and ep_combine_recv returns EP_EINTR when a
 * signal's handler ran in its thread, and every 50 ms, so that the caller can run handlers of its own. Nothing is lost: the
 * same call goes on with the same exchange and deadline. Off at the start. */
EP_API int ep_session_interrupts(ep_session* session, uint32_t on);
/* Slot table of the bank of `epoch`: [layers][max_ranks][slots] int32. EP_EINVAL if that bank is gone. */
EP_API int ep_session_slots(ep_session* session, uint64_t epoch, int32_t* slot_expert);
EP_API int ep_session_loads(ep_session* session, uint64_t* loads); /* [layers][experts] since the start */

/* The step barrier. Returns when all members of one view are in (out filled), EP_ETIMEOUT after step_timeout (call
 * again: same barrier), EP_EFENCED, EP_EGONE. timeout_ms 0 = the group's step_timeout. */
EP_API int ep_step_begin(ep_session* session, uint32_t tokens, uint32_t timeout_ms, ep_step_info* out);
/* Ends the step: *complete = 1 if every exchange of it was complete. */
EP_API int ep_step_end(ep_session* session, uint32_t* complete);
/* Tears the step for all (an exception in the engine), also while an exchange of it is being waited for. */
EP_API int ep_step_tear(ep_session* session);
/* After an EP_EINTR of ep_step_begin that will not be called again: as if the barrier had timed out. If it was passed
 * meanwhile, the step is torn and ended. */
EP_API int ep_step_cancel(ep_session* session);

/* x [tokens, hidden] of the exchange's input dtype (fp32/fp16/bf16), ids int64 or int32 [tokens, topk] logical experts or -1,
 * weights f32. lost: [tokens] u8 out, 1 = needed a lost expert; may be NULL. EP_ETORN: step torn, nothing delivered. */
EP_API int ep_dispatch_send(ep_session* session, uint32_t exchange, uint32_t channel, uint32_t layer, const void* x,
                            uint32_t x_dtype, const void* ids, uint32_t ids_bytes, const float* weights, uint32_t tokens);
/* Rows as an engine has them: full (fp32, fp16, bf16; scales NULL), or in the exchange's quantised dispatch dtype with
 * their scales, which are carried as they are. */
typedef struct ep_rows {
  const void* x;      /* [tokens][row bytes] */
  const void* scales; /* [tokens][scale bytes]: fp8 fp32 per 128, mxfp8 UE8M0 per 32, nvfp4 e4m3 per 16 elements */
  uint32_t x_dtype;
  float global_scale; /* nvfp4: value = element * scale * global_scale; 0 = 1. The same on all ranks if the kernel takes one. */
} ep_rows;
EP_API int ep_dispatch_send_rows(ep_session* session, uint32_t exchange, uint32_t channel, uint32_t layer, const ep_rows* rows,
                                 const void* ids, uint32_t ids_bytes, const float* weights, uint32_t tokens);
EP_API int ep_dispatch_recv(ep_session* session, uint32_t exchange, uint32_t channel, ep_received* out, uint8_t* lost);
/* send + recv with one doorbell */
EP_API int ep_dispatch(ep_session* session, uint32_t exchange, uint32_t channel, uint32_t layer, const void* x, uint32_t x_dtype,
                       const void* ids, uint32_t ids_bytes, const float* weights, uint32_t tokens, ep_received* out, uint8_t* lost);
EP_API int ep_combine_send(ep_session* session, uint32_t exchange, uint32_t channel);
/* Where rows of x_dtype may be written so that dispatch of up to max_tokens of them copies none: pass that address as x.
 * They are this rank's own from its combine's return to its next dispatch's. And where a combine leaves its result, to be
 * passed as `out`: valid until the channel's next combine. NULL: there is no such place, any memory is as good. */
EP_API int ep_exchange_buffers(ep_session* session, uint32_t exchange, uint32_t channel, uint32_t x_dtype, void** in, void** out);
EP_API int ep_combine_recv(ep_session* session, uint32_t exchange, uint32_t channel, void* out, uint32_t out_dtype);
EP_API int ep_combine(ep_session* session, uint32_t exchange, uint32_t channel, void* out, uint32_t out_dtype);

/* ---- the decision of a step barrier (simulator, tests) -------------------------------------------------------- */
enum { EP_CELL_WORDS = 7 };
/* What a rank with these cells would decide. epochs [n] and members [n][ranks] (incarnations, 0 = no member) are all views
 * that anything here names, by index. mine [1 + 2 * EP_BANKS]: the running view (-1: a joiner), those of my own cell, those
 * staged by now, ascending, -1 = none. cells [ranks][EP_CELL_WORDS]: step, inc, number of views (0 = no cell), their indices.
 * dead [ranks]: highest dead inc. out [5]: 0 wait 1 run 2 expelled; epoch; base; whom it waits for; 1 = doomed. */
EP_API int ep_barrier_decide(uint32_t ranks, uint32_t me, uint32_t inc, uint64_t step, const uint64_t* epochs, const uint32_t* members,
                             const int32_t* mine, const uint64_t* cells, const uint32_t* dead, uint64_t* out);

/* ---- quantised rows ------------------------------------------------------------------------------------------- */
/* Vector code of this host: 0 portable, 1 AVX2, 2 AVX-512. Exchanges use the highest; all give the same bits. */
EP_API uint32_t ep_vector_level(void);
/* x [rows][hidden] of x_dtype (fp32, fp16, bf16) to `dtype` (fp8, mxfp8, nvfp4), as dispatch does it. powers 1: fp8 scales
 * are rounded up to powers of two. EP_EINVAL: hidden, dtype or level cannot be used. */
EP_API int ep_quantise(uint32_t level, uint32_t dtype, uint32_t powers, const void* x, uint32_t x_dtype, uint64_t rows, uint64_t hidden,
                       float global_scale, void* out, void* scales);
/* And back, to fp32. */
EP_API int ep_dequantise(uint32_t level, uint32_t dtype, const void* x, const void* scales, uint64_t rows, uint64_t hidden,
                         float global_scale, float* out);

#ifdef __cplusplus
}
#endif
#endif
