#include "bank.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "errors.h"

namespace ep {

namespace {
u64 mix(u64 hash, const void* bytes, size_t size) {
  auto p = static_cast<const u8*>(bytes);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ p[i]) * 1099511628211ull;
  return hash;
}
}  // namespace

u64 view_digest(const ep_geometry& g, const ep_view& view) {
  const size_t slots = size_t(g.layers) * g.max_ranks * g.slots;
  u64 h = mix(14695981039346656037ull, &view.epoch, 16);
  h = mix(h, view.incarnation, g.max_ranks * 4);
  h = mix(h, view.slot_expert, slots * 4);
  return mix(h, view.slot_weight, slots * 4);
}

int write_bank(const ep_geometry& g, const Layout& layout, const ep_view& view, u8* image) {
  auto head = reinterpret_cast<Bank*>(image);
  memset(image, 0, layout.bank_bytes);
  head->epoch = view.epoch;
  head->previous_epoch = view.previous_epoch;
  head->digest = view.digest ? view.digest : view_digest(g, view);
  head->bytes = layout.bank_bytes;
  memcpy(head->incarnation, view.incarnation, g.max_ranks * 4);
  auto offsets = reinterpret_cast<u32*>(image + layout.bank_replica_offsets);
  auto replicas = reinterpret_cast<Replica*>(image + layout.bank_replicas);
  const u64 per_layer = u64(g.max_ranks) * g.slots;
  memcpy(image + layout.bank_slots, view.slot_expert, g.layers * per_layer * 4);
  for (u32 layer = 0; layer < g.layers; ++layer, offsets += g.experts + 1, replicas += per_layer) {
    const int32_t* expert_of = view.slot_expert + layer * per_layer;
    const u32* weight_of = view.slot_weight + layer * per_layer;
    auto live = [&](u64 i) { return view.incarnation[i / g.slots] != 0 && expert_of[i] >= 0; };
    for (u64 i = 0; i < per_layer; ++i) {
      if (expert_of[i] < -1 || expert_of[i] >= int32_t(g.experts))
        return fail(EP_EINVAL, "layer %u slot %llu of rank %llu names expert %d; it must be -1..%u", layer,
                    (unsigned long long)(i % g.slots), (unsigned long long)(i / g.slots), expert_of[i], g.experts - 1);
      if (live(i)) ++offsets[expert_of[i] + 1];
    }
    for (u32 e = 0; e < g.experts; ++e) offsets[e + 1] += offsets[e];
    // Counting sort by expert keeps (rank, slot) order, so every rank builds the same table.
    for (u64 i = 0; i < per_layer; ++i) {
      if (!live(i)) continue;
      u32 at = offsets[expert_of[i]]++;
      replicas[at] = {u16(i / g.slots), u16(i % g.slots), weight_of[i]};
    }
    for (u32 e = g.experts; e > 0; --e) offsets[e] = offsets[e - 1];
    offsets[0] = 0;
    for (u32 e = 0; e < g.experts; ++e) {
      u32 begin = offsets[e], end = offsets[e + 1];
      u64 sum = 0;
      for (u32 i = begin; i < end; ++i) sum += replicas[i].upto;
      if (begin < end && sum != 65536)
        return fail(EP_EINVAL, "layer %u expert %u: dispatch weights of its live copies sum to %llu; they must sum to 65536",
                    layer, e, (unsigned long long)sum);
      u32 upto = 0;
      for (u32 i = begin; i < end; ++i) replicas[i].upto = upto += replicas[i].upto;
    }
  }
  return 0;
}

}  // namespace ep

using namespace ep;

int ep_view_digest(const ep_geometry* geometry, const ep_view* view, uint64_t* digest) {
  if (int bad = check_geometry(*geometry)) return bad;
  *digest = view_digest(*geometry, *view);
  return 0;
}

int ep_bank_write(int bank_fd, const ep_geometry* geometry, const ep_view* view) {
  Layout layout;
  if (int bad = make_layout(*geometry, &layout)) return bad;
  if (view->epoch == 0) return fail(EP_EINVAL, "epoch is 0; views start at 1");
  void* image = mmap(nullptr, layout.bank_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, bank_fd, 0);
  if (image == MAP_FAILED) return fail(-errno, "mapping a bank of %llu bytes: %s", (unsigned long long)layout.bank_bytes, strerror(errno));
  int status = write_bank(*geometry, layout, *view, static_cast<u8*>(image));
  munmap(image, layout.bank_bytes);
  return status;
}
