// What kernels are given: by value what never changes, by pointer (device memory) what a step or a view changes, so
// that a captured graph needs no update when either does.
#pragma once
#include "../common/bank.h"
#include "../common/header.h"
#include "../common/layout.h"
#include "elasticep_cuda.h"

namespace epc {

using ep::u16;
using ep::u32;
using ep::u64;
using ep::u8;

constexpr u32 kMaxRanks = EP_MAX_RANKS;
constexpr u32 kMaskWords = kMaxRanks / 32;
constexpr u32 kChunkRows = 64;    // rows of a chunk: the bits of one word
constexpr u32 kChunks = 128;      // chunks of an exchange unless its cap asks for more
constexpr u32 kFineRows = 8;      // rows of a chunk where arrival and expansion overlap
constexpr u64 kOverlapBytes = 4u << 20;  // bytes of a full batch from which on they do
constexpr u32 kNobody = 0xffffffffu;
constexpr u32 kMostSlots = 12000;  // where rows are placed by slot: every block has all the runs' beginnings in shared memory
constexpr u32 kPlaceBlocks = 128, kPlaceRuns = 2048;  // expand.cu: blocks that find places, and runs up to which they do

// GPU parts of one channel, behind the parts that both planes share. Row r of a source belongs to chunk r % chunks and
// is bit r / chunks of its words, so that any number of tokens spreads over all thread blocks.
struct GpuChannel {
  u64 arrival;  // [R][chunks] TaggedWord: tag, and which of the chunk's rows have come to the reader
  u64 early;    // [R][early_chunks] TaggedWord: the same, when the tails have come but the rows may not have (overlap.cu)
  u64 tails;    // [R][source_rows][K] TaggedWord: tag, and slot | weight << 32
  u64 reduced;  // [R][units] u64 tag: that rank has summed its outputs for our rows of the unit (overlap.cu, fused.cu)
  u64 heads;    // [R] TaggedWord: tag, and tokens, layer and global scale of the source (make_head)
  u32 chunks, early_chunks;
  u32 overlap;  // 1: rows are expanded while others are on the link (overlap.cu)
  u32 sums_overlap;  // 1: outputs are summed while others are on the link
  u32 fused;    // 1: small batches are expanded by the kernel that receives them (fused.cu)
  u32 sum_chunks, sum_parts;  // units of `reduced`: rows r % sum_chunks, and parts of their hidden size
};

// One expert's copies as dispatch looks them up: with one or two of them nothing else is read.
struct __align__(16) Copies {
  u32 first, second;  // rank << 16 | slot
  u32 upto;           // `first` serves points below it
  u32 count;          // more than two: see the bank's list of replicas
};

enum Phase : u32 { kPhaseNone = 0, kPhaseBarrier = 1, kPhaseDispatch = 2, kPhaseCombine = 3, kPhaseJoin = 4 };  // as in ep_status
enum Half : u32 { kSend = 1, kReceive = 2 };

// Private device memory of a rank. One step's truth; written by the barrier kernel, read by all others.
struct State {
  u64 step, epoch;
  u32 torn, bank, members, incarnation;  // members: 0 when the barrier let no step run
  u32 sequence[EP_MAX_CHANNELS];  // exchanges finished on each channel in this step
  u32 opened[EP_MAX_CHANNELS];    // exchanges whose dispatch has begun
  u32 mask[kMaskWords];           // members as bits
  u32 member[kMaxRanks];          // members in ascending order
  u32 incarnations[kMaxRanks];
  u32 readers[EP_MAX_CHANNELS];   // blocks of the running combine that have read `sequence`
  u32 summed[EP_MAX_CHANNELS];    // blocks of the running combine whose sums are done (overlap.cu, fused.cu)
  u32 tearing;
  u32 waiting;                    // 1: some thread's wait is on record; others that wait, too, have their turn after it
  u64 barrier;                    // number of the barrier that this rank is at, or goes to next
  u64 floor;                      // the highest number that anything named in this region when this context came
  u64 digest;
  u64 mapped;                     // the view that Domain::active holds
  u32 lacking;                    // 1: in it some expert has no copy
  u32 policy;                     // what is done about tokens that need such a one: EP_POLICY_*; read at the barrier
  u64 said, said_views[EP_BANKS];  // the last barrier cells: their number, and the staged views that they name
  u32 said_count, said_tokens;
  u64 wait_step, wait_since;      // the last wait at a barrier
  u32 wait_rank, pad;
  u64 begun, ended;               // barriers and step ends that have run
  u64 done;                       // agreed completion: works complete here
  u64 written;                    // version of the last barrier cells
  u64 past_marks[kMaxRanks];      // leave marks that were for an earlier incarnation
  u64 ticket;                     // of the barrier that runs or ran last: what its caller may call off; 0: nobody

  __device__ bool has(u32 rank) const { return mask[rank / 32] >> (rank % 32) & 1; }
};

// What is staged, in device memory; an entry is valid when its epoch is not 0 and equals `check`.
struct Staged {
  u64 epoch, previous, digest, check;
  u32 incarnation[kMaxRanks];
};

struct HostCounts {
  u64 ticket, rows, arrived, torn;
};

// Pinned host memory; the host reads it after the stream has come to it.
struct Record {
  epc_step_info info;
  epc_fault fault;
  u64 begun, ended;   // barriers and step ends that have run; written last, so that whoever reads a new number sees the rest
  u64 at;             // globaltimer when one of them was written
  u64 offset;         // CLOCK_MONOTONIC - globaltimer; the host's, see epc_context::note_clock
  u64 called_off;     // ticket of the step that the engine gave up; the host's. A wait ahead of the kernel that tears it ends by it
  HostCounts counts[EP_MAX_EXCHANGES][EP_MAX_CHANNELS];
};

struct Domain {
  u8* base;      // rank r's data region begins at base + r * stride
  u64 stride;
  u32 me, ranks, topk, experts, slots, hidden, layers, count_loads, agreed;
  u64 leave, cells, cell_bytes, loads;
  u64 exchange_timeout_ns, step_timeout_ns, suspect_ns;
  State* state;
  const Staged* staged;        // [EP_BANKS]
  Copies* active;              // [layers][experts] of the running view, at one address for all views
  const Copies* maps;          // [EP_BANKS][layers][experts]
  const u32* lists;            // [EP_BANKS][layers][experts] first replica of each expert
  const ep::Replica* replicas;  // [EP_BANKS][layers][R * S]
  const int* slot_banks;       // [EP_BANKS][layers][S] expert in each of this rank's slots, -1 = empty
  int* slot_experts;           // [layers][S] of the running view, at one address for all views
  u32* pending;                // [layers][experts] load of the running step
  u8* scratch;                 // barrier: copies of cells
  ep::Header* header;          // host memory, by its device address
  Record* record;              // likewise

  __host__ __device__ u8* region(u32 rank) const { return base + rank * stride; }
};

struct Exchange {
  ep::ChannelLayout at;
  GpuChannel gpu;
  u32 index, channel, copies, layout, dispatch_dtype, combine_dtype, reduce, cap, rows_per_token, masked_room;
  u32 replicated, scale_layout;
  u32* route;  // own [cap][K] rank << 16 | slot, kNobody where nobody serves it
  float* route_weights;  // own [cap][K]

  // Rows go into the expert kernel's layout: contiguous or masked.
  __host__ __device__ bool expands() const { return layout == EP_LAYOUT_CONTIGUOUS || layout == EP_LAYOUT_MASKED; }
  // Most exchanges have a row per token: a division takes a tenth of a microsecond.
  __host__ __device__ u32 token_of(u32 row) const { return rows_per_token == 1 ? row : row / rows_per_token; }
};

// Runs in the expert kernel's layout: slots, or a single one for arrival order.
__host__ __device__ inline u32 runs_of(const Domain& d, const Exchange& x) { return x.layout == EP_LAYOUT_ARRIVAL ? 1 : d.slots; }

struct DispatchArgs {
  Domain domain;
  Exchange exchange;
  const u8* x;
  const u8* x_scales;
  const void* ids;
  const float* weights;
  u8* lost;
  u32 tokens, layer, ids_wide, half, row_bytes, block_lanes;
  float global_scale;
};

struct CombineArgs {
  Domain domain;
  Exchange exchange;
  u8* out;
  u32 tokens, half, parts, out_dtype, row_bytes;
};

struct ExpandArgs {
  Domain domain;
  Exchange exchange;
  int* relative;        // [R * source_rows][K] place inside the slot's run
  int* compact_ids;     // arrival with an exact count: ids and weights without gaps
  float* compact_weights;
  u32* counted;         // [kPlaceBlocks][runs] rows of each run in a block's share (expand.cu); null: too many runs
  int* totals;          // [runs] rows of each run as placed; the engine sees them as counts only when all of them fit
  u8* dirty;            // contiguous: [expanded_rows] 1 = may hold something else than zeros
  const u8* own;        // this rank's rows as the engine gave them; null: they lie where the others' do
  u32 row_bytes, scale_bytes, early, layer;
};

// Small expanded batches in one kernel each way (fused.cu).
struct FusedArgs {
  DispatchArgs dispatch;
  ExpandArgs expand;
};
struct FusedCombineArgs {
  CombineArgs combine;
  ExpandArgs expand;
};

// Rows per slot, counted when an engine asks (counts.cu).
struct SlotCountArgs {
  const int* ids;  // [entries] slot or -1
  int* counts;     // [slots]
  u64 entries;
  u32 slots;
};

// A pinned word per exchange and channel: what the host waits for with cpu_sync.
struct CountArgs {
  Domain domain;
  Exchange exchange;
  u64 ticket;
  HostCounts* out;
};

}  // namespace epc
