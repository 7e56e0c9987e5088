// Cells of the step barrier in the ranks' regions: written by a warp, read whole or not at all (design: protocol, section 3).
#pragma once
#include "decide.cuh"

namespace epc {

namespace {

constexpr u32 kDoneWord = 4 + 2 * ep::kCellViews;  // Cell::done
static_assert(sizeof(ep::Cell) == 8 * (kDoneWord + 1), "cells are written word by word");

// Thread 0: a version for the cells that are written next. The clock may stand still for a microsecond, longer than it takes
// to join a later barrier.
__device__ void new_version(const Domain& d, Barrier& b) {
  const u64 now = wall_ns() << 1, next = d.state->written + 2;
  d.state->written = b.version = now > next ? now : next;
}

// A warp writes one cell. Its version is odd meanwhile, and never repeats.
__device__ void write_cell(const Domain& d, const Barrier& b, u32 to) {
  const u32 lane = threadIdx.x % 32;
  u64* cell = reinterpret_cast<u64*>(cell_at(d, to, d.me, b.step));
  if (lane == 0) {
    store_relaxed(cell, b.version | 1);
    fence_system();
    store_relaxed(cell + 1, b.step);
    store_relaxed(cell + 2, u64(d.state->incarnation) | u64(b.tokens) << 32);
    store_relaxed(cell + 3, u64(1 + b.mine_count));
    store_relaxed(cell + kDoneWord, d.state->done);
    for (u32 i = 0; i < 1 + b.mine_count; ++i) {
      const Known& v = i ? b.mine[i - 1] : b.running;
      store_relaxed(cell + 4 + 2 * i, v.epoch);
      store_relaxed(cell + 5 + 2 * i, v.digest);
    }
  }
  u32* members = reinterpret_cast<u32*>(reinterpret_cast<ep::Cell*>(cell) + 1);
  for (u32 i = 0; i < 1 + b.mine_count; ++i) {
    const Known& v = i ? b.mine[i - 1] : b.running;
    for (u32 r = lane; r < d.ranks; r += 32) store_relaxed(members + i * d.ranks + r, v.incarnation[r]);
  }
  __syncwarp();
  if (lane == 0) {
    fence_system();
    store_relaxed(cell, b.version + 2);
  }
}

// Number and incarnation of a cell, if both are of one version; a thread. What is read behind it is at least as new.
__device__ bool peek(const ep::Cell* cell, u64* step, u32* inc) {
  const u64* words = reinterpret_cast<const u64*>(cell);
  const u64 version = load_acquire(words);
  if (!version || version & 1) return false;
  *step = load_relaxed(words + 1);
  *inc = u32(load_relaxed(words + 2));
  fence_system();
  return load_relaxed(words) == version;
}

// A warp reads one cell into scratch.
__device__ void read_cell(const Domain& d, u32 from, u64 step, Seen* out) {
  const u32 lane = threadIdx.x % 32;
  const u64* cell = reinterpret_cast<const u64*>(cell_at(d, d.me, from, step));
  u64 version = lane == 0 ? load_acquire(cell) : 0;
  version = __shfl_sync(~0u, version, 0);
  bool ok = version != 0 && !(version & 1);
  if (ok) {
    const u64 views = load_relaxed(cell + 3);
    ok = views <= ep::kCellViews;
    if (ok) {
      const u64 words = load_relaxed(cell + 2);
      if (lane == 0) {
        out->step = load_relaxed(cell + 1);
        out->views = views;
        out->done = load_relaxed(cell + kDoneWord);
        out->incarnation = u32(words);
        out->tokens = u32(words >> 32);
        for (u32 i = 0; i < views; ++i) out->view[i] = {load_relaxed(cell + 4 + 2 * i), load_relaxed(cell + 5 + 2 * i)};
      }
      const u32* members = reinterpret_cast<const u32*>(reinterpret_cast<const ep::Cell*>(cell) + 1);
      for (u32 i = lane; i < views * d.ranks; i += 32) out->members(0, d.ranks)[i] = load_relaxed(members + i);
      fence_system();
      ok = __all_sync(~0u, load_relaxed(cell) == version);
    }
  }
  if (lane == 0) out->valid = ok;
  __syncwarp();
}

__device__ void send_cells(const Domain& d, const Barrier& b) {
  for (u32 r = threadIdx.x / 32; r < d.ranks; r += kBarrierThreads / 32) {
    if (r == d.me) continue;
    bool to = b.running.incarnation[r] != 0;
    for (u32 i = 0; i < b.mine_count; ++i) to |= b.mine[i].incarnation[r] != 0;
    if (to) write_cell(d, b, r);
  }
}

// Whether this incarnation is in a view that this rank was given.
__device__ bool known(const Barrier& b, u32 rank, u32 inc) {
  bool yes = b.running.epoch && b.running.incarnation[rank] == inc;
  for (u32 i = 0; i < b.staged_count; ++i) yes |= b.staged[i].incarnation[rank] == inc;
  return yes;
}

__device__ void raise(u64* shared, u64 to) { atomicMax(reinterpret_cast<unsigned long long*>(shared), static_cast<unsigned long long>(to)); }

// One thread, for one rank: notes the number of a later barrier, if whoever wrote it is known and alive, and whether a member
// has written for this one or a later one at all.
__device__ void look_for_later(const Domain& d, Barrier& b, u32 rank, const Seen* seen) {
  u64 step = 0;
  u32 inc = 0;
  const bool other = peek(cell_at(d, d.me, rank, b.step + 1), &step, &inc);
  const u32 member = b.running.incarnation[rank];
  if (seen->valid && seen->step > b.step && b.dead[rank] < seen->incarnation && known(b, rank, seen->incarnation)) raise(&b.higher, seen->step);
  if (other && step > b.step && b.dead[rank] < inc && known(b, rank, inc)) raise(&b.higher, step);
  if (!member || b.dead[rank] >= member) return;
  const bool heard = (seen->valid && seen->incarnation == member && seen->step >= b.step) || (other && inc == member && step >= b.step);
  if (!heard) b.unheard = 1;
}

// Reads the cells for this barrier, and with `look` what tells of a later one.
__device__ void read_cells(const Domain& d, Barrier& b, bool look) {
  const Rules rules{d, b};
  for (u32 r = threadIdx.x / 32; r < d.ranks; r += kBarrierThreads / 32) {
    Seen* seen = rules.seen(r);
    if (r == d.me) {
      if (threadIdx.x % 32 == 0) seen->valid = 0;
      continue;
    }
    read_cell(d, r, b.step, seen);
    if (look && threadIdx.x % 32 == 0) look_for_later(d, b, r, seen);
  }
}

}  // namespace

}  // namespace epc
