// How large the launches of exchanges are: blocks, threads and shared memory, and how rows move.
#pragma once
#include "context.h"

namespace epc {

// Measured on H200: bulk copies push best from two megabytes on, and pull best from there to four; above, both
// ways pull at the link's rate and plain loads start sooner.
constexpr u64 kBulkBytes = 2u << 20, kBulkPullBytes = 2u << 20, kBulkPullMost = 4u << 20;

inline u32 round_up(u32 v, u32 to) { return (v + to - 1) / to * to; }

inline u32 sm_budget(const epc_context& c) {
  const u32 cap = c.config.num_sms ? c.config.num_sms : c.sms;
  return cap < c.grid_cap ? cap : c.grid_cap;
}

// Threads so that a row of `vectors` 16-byte words is an equal number of steps for each.
inline u32 threads_for(u32 vectors, u32 most) {
  const u32 steps = (vectors + most - 1) / most;
  const u32 threads = round_up((vectors + steps - 1) / steps, 32);
  return threads < 128 ? 128 : threads;
}

// Blocks of `budget` with one task, `tuned` (or `usual`) of 256; both tasks have one at least.
inline u32 share_of(u32 budget, u32 tuned, u32 usual) {
  const u32 n = (budget * (tuned ? tuned : usual) + 255) / 256;
  return n < 1 ? 1 : n >= budget ? budget - 1 : n;
}

inline u32 plan_of(const epc_context& c) { return c.config.pinned_plan & 0xff; }

inline bool wants_bulk(const epc_context& c, u64 bytes) {
  if (plan_of(c)) return plan_of(c) == 2;
  return bytes >= kBulkBytes;
}

inline Shape dispatch_shape(const epc_context& c, const Exchange& x, Payload payload) {
  Shape s{};
  s.early = c.early;
  if (payload == Payload::kBulk) {
    s.threads = kMostPushThreads;
    s.shared = kPushShared;
  } else if (payload == Payload::kRaw) {
    // Few threads leave room on the SM for the next kernel, which then starts while this one waits.
    s.threads = threads_for(u32(x.at.row_bytes / 16), c.config.pinned_plan & EPC_TUNE_WIDE ? kMostRawThreads : 512);
  } else if (payload == Payload::kNone) {
    s.threads = kMostPushThreads;
  } else {
    s.threads = threads_for(c.domain.hidden / 16, kMostPushThreads);
  }
  const u32 budget = sm_budget(c);
  s.grid = x.gpu.chunks < budget ? x.gpu.chunks : budget;
  return s;
}

// Of a combine that pulls; and into how many parts it splits each row (a.parts).
inline Shape pull_shape(const epc_context& c, CombineArgs& a, bool bulk) {
  const u32 vectors = (a.exchange.combine_dtype == EP_FP8 ? c.domain.hidden : a.row_bytes) / 16, budget = sm_budget(c);
  Shape shape{};
  shape.early = c.early;
  a.parts = 1;
  if (!(a.half & kReceive)) return {1, 128, 0, c.early};
  if (bulk) {
    shape.threads = kBulkWarps * 32;
    shape.shared = kPullShared;
    shape.grid = a.tokens < budget ? a.tokens : budget;
  } else {
    const u32 blocks_wanted = plan_of(c) == 1 ? budget : budget * (c.early ? 2 : 1);
    u32 parts = a.tokens ? blocks_wanted / a.tokens : 1;
    parts = parts < 1 ? 1 : parts;
    const u32 most = vectors / 128 ? vectors / 128 : 1;
    a.parts = parts < most ? parts : most;
    shape.threads = threads_for((vectors + a.parts - 1) / a.parts, kMostPullThreads);
    const u32 blocks = a.tokens * a.parts;
    const u32 most_blocks = shape.threads <= 512 ? blocks_wanted : budget;  // two small blocks share an SM
    shape.grid = blocks < most_blocks ? blocks : most_blocks / a.parts * a.parts;
  }
  if (!shape.grid) shape.grid = a.parts;
  return shape;
}

// Of a fused combine.
inline Shape sum_shape(const epc_context& c, const Exchange& x) {
  const u32 width = u32(x.at.y_row_bytes / 16 + x.gpu.sum_parts - 1) / x.gpu.sum_parts, units = x.gpu.sum_chunks * x.gpu.sum_parts;
  Shape s{};
  s.early = c.early;
  s.threads = c.config.pinned_plan & EPC_TUNE_WIDE_SUMS && width <= 512 ? round_up(2 * width, 32) : threads_for(width, 512);
  if (s.threads < 256) s.threads = 256;
  s.grid = units < sm_budget(c) ? units : sm_budget(c);
  return s;
}

}  // namespace epc
