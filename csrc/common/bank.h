// A view's tables as runners hold them: one of EP_BANKS images in the data region, index epoch % EP_BANKS.
#pragma once
#include "layout.h"

namespace ep {

// One live copy of an expert. `upto` is the running sum of dispatch weights over the expert's copies (65536 = all).
struct Replica {
  u16 rank, slot;
  u32 upto;
};

struct Bank {
  u64 epoch, previous_epoch, digest, bytes;
  u32 incarnation[EP_MAX_RANKS];  // 0: no member
};

struct BankTables {
  const Bank* head;
  const u32* offsets;       // [layers][experts + 1] into the layer's replicas
  const Replica* replicas;  // [layers][R * S]
  const int32_t* slots;     // [layers][R][S]

  BankTables() = default;
  BankTables(const Layout& layout, const u8* image)
      : head(reinterpret_cast<const Bank*>(image)),
        offsets(reinterpret_cast<const u32*>(image + layout.bank_replica_offsets)),
        replicas(reinterpret_cast<const Replica*>(image + layout.bank_replicas)),
        slots(reinterpret_cast<const int32_t*>(image + layout.bank_slots)) {}
};

u64 view_digest(const ep_geometry& geometry, const ep_view& view);
int write_bank(const ep_geometry& geometry, const Layout& layout, const ep_view& view, u8* image);

// A point of the low-discrepancy sequence by which an expert's tokens are split over its copies, in [0, 65536).
// Stratified in the token index; rank, layer and step shift the start, so that constant decode indices do not skew it.
inline u32 split_point(u32 token, u32 rank, u32 layer, u64 step) {
  u64 shift = (u64(rank) << 40) ^ (u64(layer) << 20) ^ step;
  shift = (shift ^ shift >> 31) * 0x9E3779B97F4A7C15ull;
  shift = (shift ^ shift >> 29) * 0xBF58476D1CE4E5B9ull;
  return u32((token * 2654435769u + u32(shift >> 32)) >> 16);
}

// The copy that serves `expert` for this point, or nullptr when no member holds one.
inline const Replica* choose_replica(const BankTables& tables, const ep_geometry& g, u32 layer, u32 expert, u32 point) {
  const u32* offsets = tables.offsets + u64(layer) * (g.experts + 1);
  const Replica* r = tables.replicas + u64(layer) * g.max_ranks * g.slots;
  for (u32 i = offsets[expert]; i < offsets[expert + 1]; ++i)
    if (point < r[i].upto) return r + i;
  return nullptr;
}

}  // namespace ep
