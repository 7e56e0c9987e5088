// The decision of a step barrier (design: protocol, section 4): pure, the same on every rank from the same cells.
//
// Each rank writes one cell per barrier to every member of its view and of the later views it has staged. From the
// cells everyone picks the highest epoch that all members of both the running and that epoch have staged.
#pragma once
#include <atomic>

#include "layout.h"

namespace ep {

// What a cell says of one view. Incarnations of its members follow the cell, [max_ranks] u32 per view.
struct CellView {
  u64 epoch, digest;
};

struct Cell {
  std::atomic<u64> version;  // odd while being written
  u64 step;
  u32 incarnation, tokens;
  u64 views;                 // entries used in `view`
  CellView view[kCellViews];  // [0] the running view, then the staged later ones, ascending
  u64 done;                  // agreed completion: works complete on the writer
};

// A consistent copy of a cell.
struct CellCopy {
  bool valid = false;  // written for `step` by incarnation `incarnation`
  u64 step = 0;
  u32 incarnation = 0, tokens = 0;
  u32 views = 0;
  u64 done = 0;
  CellView view[kCellViews];
  u32 members[kCellViews][EP_MAX_RANKS];

  u64 epoch() const { return views ? view[0].epoch : 0; }
  bool has(u64 epoch) const;  // runs or has staged it
  const u32* members_of(u64 epoch) const;
};

struct KnownView {
  u64 epoch = 0, previous_epoch = 0, digest = 0;
  const u32* incarnation = nullptr;  // [max_ranks]
};

struct BarrierInput {
  u32 ranks, me, my_incarnation;
  u64 step;
  KnownView running;                       // epoch 0: a joiner
  KnownView staged[EP_BANKS];              // as written in my own cell, ascending; `snapshot` entries
  u32 snapshot;
  KnownView staged_now[EP_BANKS];          // what is staged by now (to follow a newer base), `staged_count` entries
  u32 staged_count;
  const CellCopy* cells;                   // [ranks], for `step`; [me] unused
  const std::atomic<u32>* dead;            // [ranks] highest dead incarnation
};

struct BarrierDecision {
  enum Kind { kWait, kRun, kExpelled } kind = kWait;
  u64 epoch = 0;       // kRun: the view of this step; kExpelled: the first view without me
  u64 base = 0;        // the view that was left behind
  u32 waits_for = 0;   // kWait: the first member without a cell
  bool doomed = false;  // kRun: a member of that view is dead, so no step runs
};

BarrierDecision decide(const BarrierInput& in);

void write_cell(Cell* cell, u32 ranks, u64 step, u32 incarnation, u32 tokens, u64 done, const KnownView* views, u32 count);
// False when no consistent cell is there (never written, or its writer died in the middle).
bool read_cell(const Cell* cell, u32 ranks, CellCopy* out);

}  // namespace ep
