// Staging a view: from the bank's image, which both planes share, into the tables that kernels of a GPU look up.
#include <cstring>

#include "../common/bank.h"
#include "context.h"

using namespace epc;

namespace {

// As they lie in a bank of device memory.
struct GpuTables {
  std::vector<int> slots;    // [layers][S] this rank's
  std::vector<Copies> maps;  // [layers][experts]
  std::vector<u32> lists;    // [layers][experts]

  GpuTables(const ep_geometry& g, u32 rank, const ep::BankTables& from)
      : slots(u64(g.layers) * g.slots), maps(u64(g.layers) * g.experts), lists(maps.size()) {
    const u64 per_layer = u64(g.max_ranks) * g.slots;
    for (u32 layer = 0; layer < g.layers; ++layer) {
      memcpy(slots.data() + u64(layer) * g.slots, from.slots + layer * per_layer + u64(rank) * g.slots, g.slots * sizeof(int));
      const u32* offsets = from.offsets + u64(layer) * (g.experts + 1);
      for (u32 e = 0; e < g.experts; ++e) {
        const ep::Replica* list = from.replicas + layer * per_layer + offsets[e];
        const u32 n = offsets[e + 1] - offsets[e];
        auto packed = [&](u32 i) { return i < n ? u32(list[i].rank) << 16 | list[i].slot : kNobody; };
        maps[u64(layer) * g.experts + e] = {packed(0), packed(1), n ? list[0].upto : 0, n};
        lists[u64(layer) * g.experts + e] = offsets[e];
      }
    }
  }
};

// Into a bank of a table that kernels read only.
template <class T>
int upload(const T* banks, u64 bank, const T* from, u64 count, cudaStream_t stream) {
  EPC_TRY(cudaMemcpyAsync(const_cast<T*>(banks) + bank * count, from, count * sizeof(T), cudaMemcpyHostToDevice, stream));
  return 0;
}

}  // namespace

int epc_context::check_view(const ep::Bank& head) const {
  if (head.bytes != layout.base.bank_bytes)
    return ep::fail(EP_EMISMATCH, "the bank has %llu bytes, this group's have %llu", wide(head.bytes), wide(layout.base.bank_bytes));
  if (head.incarnation[config.rank] != config.incarnation)
    return ep::fail(EP_EINVAL, "view %llu has incarnation %u of rank %u, this is %u", wide(head.epoch), head.incarnation[config.rank], config.rank,
                    config.incarnation);
  const u64 running = __atomic_load_n(&record->info.epoch, __ATOMIC_RELAXED);
  if (running && running + EP_BANKS <= head.epoch)
    return ep::fail(EP_EUSAGE, "view %llu needs the bank of view %llu, which still runs", wide(head.epoch), wide(running));
  for (u32 r = 0; r < config.geometry.max_ranks; ++r)
    if (head.incarnation[r] && !regions.mapped(r))
      return ep::fail(EP_EUSAGE, "view %llu has rank %u, whose region is not mapped", wide(head.epoch), r);
  return 0;
}

int epc_context::stage(const u8* image) {
  const ep_geometry& g = config.geometry;
  const ep::BankTables tables(layout.base, image);
  const ep::Bank& head = *tables.head;
  if (int bad = check_view(head)) return bad;
  const u64 bank = head.epoch % EP_BANKS;
  std::lock_guard<std::mutex> guard(staging);
  if (held[bank].epoch == head.epoch) {
    if (held[bank].digest == head.digest) return 0;  // kernels may be reading it
    return ep::fail(EP_EMISMATCH, "view %llu is staged already, with another content", wide(head.epoch));
  }
  const GpuTables gpu(g, config.rank, tables);
  Staged entry{head.epoch, head.previous_epoch, head.digest, 0, {}};
  memcpy(entry.incarnation, head.incarnation, sizeof entry.incarnation);

  RelaxedCapture relaxed;
  if (int bad = use_device(config.device)) return bad;
  auto board = const_cast<Staged*>(domain.staged) + bank;
  EPC_TRY(cudaMemsetAsync(&board->check, 0, sizeof board->check, side));
  if (int bad = upload(domain.maps, bank, gpu.maps.data(), gpu.maps.size(), side)) return bad;
  if (int bad = upload(domain.lists, bank, gpu.lists.data(), gpu.lists.size(), side)) return bad;
  if (int bad = upload(domain.replicas, bank, tables.replicas, u64(g.layers) * g.max_ranks * g.slots, side)) return bad;
  if (int bad = upload(domain.slot_banks, bank, gpu.slots.data(), gpu.slots.size(), side)) return bad;
  EPC_TRY(cudaMemcpyAsync(board, &entry, sizeof entry, cudaMemcpyHostToDevice, side));
  EPC_TRY(cudaStreamSynchronize(side));
  EPC_TRY(cudaMemcpyAsync(&board->check, &entry.epoch, sizeof entry.epoch, cudaMemcpyHostToDevice, side));
  EPC_TRY(cudaStreamSynchronize(side));
  held[bank] = {head.epoch, head.digest};
  header->staged[bank].store(head.epoch);
  return 0;
}
