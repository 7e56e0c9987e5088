#include "flow.h"

#include <algorithm>

namespace ep::placement {

Flow::Flow(const Cluster& cluster, int experts)
    : level_(cluster.ranks), next_slot_(cluster.ranks), queue_(cluster.ranks), expert_level_(experts),
      next_copy_(experts) {}

int64_t Flow::run(Layer& layer, int cell, std::vector<uint8_t>& cut) {
  const auto& ranks = layer.cluster.cell_ranks[cell];
  cut.assign(layer.cluster.ranks, 0);
  if (ranks.empty()) return 0;
  int64_t sum = 0, highest = 0;
  for (int rank : ranks) {
    sum += layer.rank_load[rank];
    highest = std::max(highest, layer.rank_load[rank]);
  }
  const auto n = static_cast<int64_t>(ranks.size());
  cap_ = (sum + n - 1) / n;
  // Each pass either ends or raises the cap to a proven lower bound; every raise saturates another rank.
  for (size_t pass = 0; pass <= ranks.size() && highest > cap_; pass++) {
    while (find_levels(layer, ranks)) {
      std::fill(next_copy_.begin(), next_copy_.end(), 0);
      for (int rank : ranks) next_slot_[rank] = rank * layer.cluster.slots;
      for (int rank : ranks)
        if (layer.rank_load[rank] > cap_) push(layer, rank, layer.rank_load[rank] - cap_);
    }
    int64_t held = 0, count = 0;
    highest = 0;
    for (int rank : ranks) highest = std::max(highest, layer.rank_load[rank]);
    if (highest <= cap_) break;
    for (int rank : ranks) {
      cut[rank] = level_[rank] >= 0;
      if (!cut[rank]) continue;
      held += layer.rank_load[rank];
      count++;
    }
    cap_ = (held + count - 1) / count;
  }
  return std::max(cap_, highest);
}

// Breadth first from the ranks above the cap to the nearest ones below it.
bool Flow::find_levels(const Layer& layer, const std::vector<int>& ranks) {
  const int slots = layer.cluster.slots;
  size_t head = 0, tail = 0;
  std::fill(expert_level_.begin(), expert_level_.end(), -1);
  for (int rank : ranks) {
    level_[rank] = layer.rank_load[rank] > cap_ ? 0 : -1;
    if (level_[rank] == 0) queue_[tail++] = rank;
  }
  sink_level_ = -1;
  while (head < tail) {
    const int rank = queue_[head++];
    const int32_t level = level_[rank];
    if (sink_level_ >= 0 && level + 1 > sink_level_) break;
    for (int at = rank * slots, end = at + layer.cluster.capacity[rank]; at < end; at++) {
      const int expert = layer.slot[at];
      if (layer.share[at] == 0 || expert_level_[expert] >= 0) continue;
      expert_level_[expert] = level;
      for (int to : layer.active[expert]) {
        const int other = layer.rank_of(to);
        if (level_[other] >= 0) continue;
        level_[other] = level + 1;
        queue_[tail++] = other;
        if (layer.rank_load[other] < cap_) sink_level_ = level + 1;
      }
    }
  }
  return sink_level_ >= 0;
}

int64_t Flow::push(Layer& layer, int rank, int64_t amount) {
  if (level_[rank] == sink_level_) return std::min(amount, std::max<int64_t>(0, cap_ - layer.rank_load[rank]));
  int64_t done = 0;
  const int end = rank * layer.cluster.slots + layer.cluster.capacity[rank];
  for (int32_t& at = next_slot_[rank]; at < end; at++) {
    const int expert = layer.slot[at];
    if (layer.share[at] == 0 || expert_level_[expert] != level_[rank]) continue;
    const auto& copies = layer.active[expert];
    for (int32_t& i = next_copy_[expert]; i < static_cast<int32_t>(copies.size()); i++) {
      const int to = copies[i], other = layer.rank_of(to);
      if (level_[other] != level_[rank] + 1) continue;
      const int64_t want = std::min(amount - done, layer.share[at]);
      const int64_t got = push(layer, other, want);
      if (got > 0) {
        layer.set_share(at, layer.share[at] - got);
        layer.set_share(to, layer.share[to] + got);
        done += got;
      }
      if (done == amount) return done;
      if (got == want) break;  // this copy is drained; the next rank still has room
    }
  }
  return done;
}

}  // namespace ep::placement
