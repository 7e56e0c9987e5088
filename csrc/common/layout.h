// The one place where an offset of a region is computed. Everything else asks for a Layout.
//
// A rank has two regions: a header (host memory, header.h) and data (host or device memory), whose parts are below.
// "own" parts are written by this rank only; all others have one sub-area per source rank, written by that source.
#pragma once
#include "../elasticep.h"

namespace ep {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// 0 builds the yardstick of `python -m elasticep.bench steady`: a core that never looks at who died, left or was fenced.
#ifndef EP_FAULT_CHECKS
#define EP_FAULT_CHECKS 1
#endif
constexpr bool kFaultChecks = EP_FAULT_CHECKS;

constexpr u64 kAlign = 256;
constexpr u32 kCellViews = 1 + EP_BANKS - 1;  // the running epoch and every later staged one

// One channel of one exchange. R = max_ranks, C = cap, K = topk, S = slots, H = hidden.
// Sources write rows of token t at index t (copies all / per_rank) or t * K + k (per_expert).
struct ChannelLayout {
  u64 rows;           // [R][source_rows][row_bytes]      payload in the dispatch dtype
  u64 scales;         // [R][source_rows][scale_bytes]
  u64 tail_slots;     // [R][source_rows][K] int32        slot on the reader, -1 where the expert is elsewhere
  u64 tail_weights;   // [R][source_rows][K] float
  u64 bitmap;         // [R][bitmap_words] u64            which of the source's rows come to the reader
  u64 arrival;        // [R] Arrival
  u64 ready;          // [R] Flag
  u64 recv_ids;       // own [R * source_rows][K] int32   tail_slots with -1 for rows that did not come
  u64 recv_weights;   // own [R * source_rows][K] float
  u64 slot_counts;    // own [S] int32
  u64 slot_offsets;   // own [S + 1] int32                contiguous layout
  u64 expanded;       // own [expanded_rows][row_bytes]   contiguous, masked, exact arrival
  u64 expanded_scales;
  u64 expanded_of;    // own [R * source_rows][K] int32   row of (source row, k) in `expanded`, -1 none; read by home ranks
  u64 y;              // own [y_rows][H] combine dtype    expert outputs, pulled by home ranks
  u64 y_reduced;      // own [R * C][H] combine dtype     pre-reduced outputs of contiguous/masked with per_rank
  u64 in_x;           // own [C][H] float-sized           service launch: what the engine hands over
  u64 in_ids;         // own [C][K] int32
  u64 in_weights;     // own [C][K] float
  u64 in_lost;        // own [C] u8
  u64 out;            // own [C][H] float-sized           service launch: what the engine gets back
  u64 source_rows;    // C, or C * K
  u64 row_bytes, scale_bytes, bitmap_words, expanded_rows, y_rows, y_row_bytes;
  u64 end;
  u64 sources;        // R; with replicated input 1: there are only own rows, and every [R] above but bitmap and flags is [1]
  u64 row_slots;      // own [expanded_rows] int32        contiguous: slot of each row, -1 = padding
  u64 y_full;         // own [y_rows][H] bf16             where the kernel writes when y is quantised before it is ready
  u64 room;           // masked: rows per slot
  u64 scale_lead, scale_columns;  // scale layouts other than rows: words per column, columns
};

struct Layout {
  u64 digest;        // over geometry and ABI version: two sides with the same digest agree on every offset
  u64 header_bytes, header_loads;    // the latter: inline launch, a copy of `loads` that a daemon reads where data is on a GPU
  u64 data_bytes;
  u64 banks, bank_bytes;             // own [EP_BANKS][bank_bytes], see bank.h
  u64 cells, cell_bytes;             // [2 parities][R][cell_bytes], see barrier.h
  u64 leave;                         // [R] Flag: LeaveMark
  u64 loads;                         // own [layers][experts] u64
  // inside a bank
  u64 bank_replica_offsets;          // u32 [layers][experts + 1]
  u64 bank_replicas;                 // Replica [layers][R * S]
  u64 bank_slots;                    // int32 [layers][R][S]
  ChannelLayout channel[EP_MAX_EXCHANGES][EP_MAX_CHANNELS];
};

// A flag alone on its cache line, so that polling one source never bounces another's.
struct alignas(64) Flag {
  u64 word;
};

// Bitmap, tokens and layer are valid once `tag` (released last) is the expected one.
struct alignas(64) Arrival {
  u64 tag;
  u32 tokens, layer;
  float global_scale;  // nvfp4
};

// step | epoch | number of the exchange in the step and channel | index of the exchange in the group's config.
constexpr int kTagStepShift = 28, kTagEpochShift = 16, kTagSequenceShift = 4;
constexpr u64 kMaxSequence = 0xfff;
constexpr u64 make_tag(u64 step, u64 epoch, u64 sequence, u64 exchange) {
  return step << kTagStepShift | (epoch & 0xfff) << kTagEpochShift | (sequence & kMaxSequence) << kTagSequenceShift |
         (exchange & 0xf);
}
constexpr u64 tag_step(u64 tag) { return tag >> kTagStepShift; }
constexpr u64 tag_epoch(u64 tag) { return tag >> kTagEpochShift & 0xfff; }

// A leave mark counts against every step up to the one it names; its step only grows.
constexpr u64 make_leave(u64 step, u64 epoch, u64 why) { return step << 24 | (epoch & 0xffff) << 8 | (why & 0xff); }
constexpr u64 leave_step(u64 mark) { return mark >> 24; }
enum LeaveWhy : u8 { kLeaveTorn = 1, kLeaveExpelled = 2, kLeaveDoomed = 3 };

// Bytes of a value of `dtype` for the formats that have whole bytes per element; 0 otherwise.
u32 element_bytes(u32 dtype);
u64 row_payload_bytes(u32 dtype, u64 hidden);
u64 row_scale_bytes(u32 dtype, u64 hidden);
// Elements that share a scale, 0 for full formats.
u32 block_of(u32 dtype);

// Refuses geometries whose numbers cannot work; the sentence is in ep_last_error(). 0 or EP_EINVAL.
int check_geometry(const ep_geometry& geometry);
int make_layout(const ep_geometry& geometry, Layout* out);

}  // namespace ep
