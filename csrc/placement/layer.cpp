#include "layer.h"

#include <algorithm>

namespace ep::placement {

void Cluster::set_cells(bool by_node) {
  cells = by_node ? nodes : 1;
  cell.assign(ranks, 0);
  cell_ranks.assign(cells, {});
  for (int rank = 0; rank < ranks; rank++) {
    if (by_node) cell[rank] = node[rank];
    if (open[rank]) cell_ranks[cell[rank]].push_back(rank);
  }
  plain = cells == 1 && std::count(open.begin(), open.end(), 0) == 0;
}

int64_t scale_loads(const int64_t* tokens, int experts, std::vector<int64_t>& out) {
  constexpr uint64_t kHigh = uint64_t{1} << 46;
  unsigned __int128 sum = 0;
  for (int e = 0; e < experts; e++) sum += static_cast<uint64_t>(tokens[e]);
  out.resize(experts);
  if (sum == 0) {
    std::fill(out.begin(), out.end(), int64_t{1} << 20);
    return static_cast<int64_t>(experts) << 20;
  }
  int down = 0, up = 0;
  while ((sum >> down) >= kHigh) down++;
  while ((sum << (up + 1)) < kHigh) up++;
  int64_t total = 0;
  for (int e = 0; e < experts; e++) {
    const auto wide = static_cast<unsigned __int128>(static_cast<uint64_t>(tokens[e]));
    out[e] = static_cast<int64_t>(down ? wide >> down : wide << up) + 1;
    total += out[e];
  }
  return total;
}

Layer::Layer(const Cluster& c, int experts_)
    : cluster(c), experts(experts_), home(experts_, 0), slot(c.ranks * c.slots, kEmpty),
      share(c.ranks * c.slots, 0), rank_load(c.ranks, 0), used(c.ranks, 0), first_free(c.ranks, 0), where(experts_), active(experts_),
      had(experts_, 0) {}

void Layer::reset(const int64_t* tokens, const int32_t* previous_) {
  total = scale_loads(tokens, experts, load);
  // Load and id in one word: loads are below 2^47, ids below 2^16.
  std::vector<uint64_t> sorted(experts);
  for (int e = 0; e < experts; e++) sorted[e] = static_cast<uint64_t>(load[e]) << kIdBits | static_cast<uint64_t>(e);
  std::sort(sorted.begin(), sorted.end());
  order.resize(experts);
  for (int e = 0; e < experts; e++) order[e] = static_cast<int32_t>(sorted[e] & ((1 << kIdBits) - 1));
  previous = previous_;
  std::fill(had.begin(), had.end(), 0);
  for (size_t at = 0; previous && at < slot.size(); at++)
    if (previous[at] >= 0) had[previous[at]] = 1;
  std::fill(home.begin(), home.end(), 0);
  clear();
}

void Layer::clear() {
  std::fill(slot.begin(), slot.end(), kEmpty);
  std::fill(share.begin(), share.end(), 0);
  std::fill(rank_load.begin(), rank_load.end(), 0);
  std::fill(used.begin(), used.end(), 0);
  std::fill(first_free.begin(), first_free.end(), 0);
  for (auto& list : where) list.clear();
  for (auto& list : active) list.clear();
}

void Layer::adopt(const uint32_t* weight) {
  clear();
  for (int rank = 0; rank < cluster.ranks; rank++)
    for (int s = 0; s < cluster.capacity[rank]; s++) {
      const int at = rank * cluster.slots + s;
      if (previous[at] < 0) continue;
      slot[at] = previous[at];
      used[rank]++;
      where[previous[at]].push_back(at);
    }
  for (int e = 0; e < experts; e++) {
    int64_t given = 0, left = load[e];
    if (where[e].empty()) continue;
    for (int at : where[e]) given += weight ? weight[at] : 0;
    if (given > 0) {
      for (int at : where[e]) {
        const int64_t part = std::min<int64_t>(left, load[e] * weight[at] / given);
        set_share(at, part);
        left -= part;
      }
      // What rounding left over goes to a copy that takes tokens anyhow.
      for (int at : where[e])
        if (weight[at] > 0) {
          set_share(at, share[at] + left);
          break;
        }
    }
  }
}

void Layer::adopt_closed() {
  for (int rank = 0; previous && rank < cluster.ranks; rank++) {
    if (cluster.open[rank]) continue;
    for (int s = 0; s < cluster.capacity[rank]; s++) {
      const int at = rank * cluster.slots + s;
      if (previous[at] < 0) continue;
      slot[at] = previous[at];
      used[rank]++;
      where[previous[at]].push_back(at);
    }
  }
}

void Layer::activate() {
  for (int e = 0; e < experts; e++) {
    refresh(e);
    int64_t given = 0;
    for (int at : active[e]) given += share[at];
    if (given == 0) split_evenly(e);
  }
}

int Layer::find(int expert, int rank) const {
  for (int at : where[expert])
    if (cluster.rank_of[at] == rank) return at;
  return -1;
}

bool Layer::held_before(int expert, int rank) const {
  if (!previous || !had[expert]) return false;
  const int32_t* row = previous + rank * cluster.slots;
  return std::find(row, row + cluster.capacity[rank], expert) != row + cluster.capacity[rank];
}

int Layer::open_copies(int expert) const {
  int count = 0;
  for (int at : where[expert]) count += cluster.open[cluster.rank_of[at]];
  return count;
}

int Layer::add(int expert, int rank) {
  int at = rank * cluster.slots + first_free[rank];
  while (slot[at] != kEmpty) at++;
  first_free[rank] = at - rank * cluster.slots + 1;
  slot[at] = expert;
  share[at] = 0;
  used[rank]++;
  where[expert].push_back(at);
  if (!cluster.plain || where[expert].size() == 1) {
    refresh(expert);
  } else {
    active[expert].push_back(at);
  }
  return at;
}

void Layer::remove(int at) {
  const int expert = slot[at], rank = cluster.rank_of[at];
  const int64_t tokens = share[at];
  set_share(at, 0);
  slot[at] = kEmpty;
  used[rank]--;
  first_free[rank] = std::min(first_free[rank], at - rank * cluster.slots);
  auto& list = where[expert];
  list.erase(std::find(list.begin(), list.end(), at));
  refresh(expert);
  if (list.size() > 1) set_share(active[expert][0], share[active[expert][0]] + tokens);
}

void Layer::drop(int expert) {
  for (size_t i = where[expert].size(); i-- > 0;)
    if (cluster.open[cluster.rank_of[where[expert][i]]]) remove(where[expert][i]);
}

void Layer::exchange(int a, int b) {
  const int64_t share_a = share[a], share_b = share[b];
  auto& list_a = where[slot[a]];
  auto& list_b = where[slot[b]];
  *std::find(list_a.begin(), list_a.end(), a) = b;
  *std::find(list_b.begin(), list_b.end(), b) = a;
  std::swap(slot[a], slot[b]);
  set_share(a, share_b);
  set_share(b, share_a);
  refresh(slot[a]);
  refresh(slot[b]);
}

void Layer::settle() {
  if (!previous) return;
  std::vector<std::pair<int32_t, int64_t>> content;
  for (int rank = 0; rank < cluster.ranks; rank++) {
    const int first = rank * cluster.slots, end = first + cluster.capacity[rank];
    content.clear();
    for (int at = first; at < end; at++) {
      if (slot[at] >= 0 && slot[at] != previous[at]) {
        content.emplace_back(slot[at], share[at]);
        slot[at] = kEmpty;
        share[at] = 0;
      }
    }
    // Three rounds: into the slot that holds it; into slots that hold nothing; into what is left.
    for (int round = 0; round < 3 && !content.empty(); round++) {
      size_t kept = 0;
      for (const auto& item : content) {
        int at = first;
        while (at < end && !(slot[at] == kEmpty && (round == 0   ? previous[at] == item.first
                                                    : round == 1 ? previous[at] < 0
                                                                 : true)))
          at++;
        if (at == end) {
          content[kept++] = item;
          continue;
        }
        slot[at] = item.first;
        share[at] = item.second;
      }
      content.resize(kept);
    }
  }
  for (auto& list : where) list.clear();
  for (size_t at = 0; at < slot.size(); at++)
    if (slot[at] >= 0) where[slot[at]].push_back(static_cast<int32_t>(at));
  for (int e = 0; e < experts; e++) refresh(e);
}

void Layer::refresh(int expert) {
  // At home on open ranks; else on open ranks; else, on draining ones: tokens must go somewhere.
  auto& list = active[expert];
  list.clear();
  for (int at : where[expert])
    if (cluster.open[rank_of(at)] && cluster.cell[rank_of(at)] == home[expert]) list.push_back(at);
  if (list.empty()) {
    int cell = -1;
    for (int at : where[expert]) {
      if (!cluster.open[rank_of(at)]) continue;
      if (cell < 0) cell = cluster.cell[rank_of(at)];
      if (cluster.cell[rank_of(at)] == cell) list.push_back(at);
    }
  }
  if (list.empty()) list = where[expert];
  if (list.empty() || list.size() == where[expert].size()) {
    // A single copy takes all there is, also what an expert without any copy had not placed.
    if (where[expert].size() == 1) set_share(list[0], load[expert]);
    return;
  }
  int64_t moved = 0;
  for (int at : where[expert])
    if (std::find(list.begin(), list.end(), at) == list.end()) {
      moved += share[at];
      set_share(at, 0);
    }
  if (moved > 0) set_share(list[0], share[list[0]] + moved);
}

void Layer::split_evenly(int expert) {
  const auto& list = active[expert];
  if (list.empty()) return;
  const int64_t n = static_cast<int64_t>(list.size());
  for (int64_t i = 0; i < n; i++) set_share(list[i], load[expert] * (i + 1) / n - load[expert] * i / n);
}

int64_t Layer::max_load() const { return *std::max_element(rank_load.begin(), rank_load.end()); }

int Layer::moves() const {
  int count = 0;
  for (size_t at = 0; at < slot.size(); at++) count += slot[at] >= 0 && (!previous || previous[at] != slot[at]);
  return count;
}

int Layer::restored() const {
  int count = 0;
  for (int e = 0; e < experts; e++) count += previous && !had[e] && !where[e].empty();
  return count;
}

void write_tables(const Layer& layer, int32_t* slot_expert, uint32_t* slot_weight) {
  std::copy(layer.slot.begin(), layer.slot.end(), slot_expert);
  std::fill(slot_weight, slot_weight + layer.slot.size(), 0u);
  std::vector<std::pair<int64_t, int>> rests;
  for (int e = 0; e < layer.experts; e++) {
    const auto& list = layer.active[e];
    if (list.size() == 1) slot_weight[list[0]] = kOne;
    if (list.size() < 2) continue;
    // Largest remainder: at most one unit off per copy, and the sum is exact.
    int64_t left = kOne;
    rests.clear();
    for (int at : list) {
      if (layer.share[at] == 0) continue;
      const int64_t scaled = layer.share[at] * kOne;
      slot_weight[at] = static_cast<uint32_t>(scaled / layer.load[e]);
      left -= slot_weight[at];
      rests.emplace_back(-(scaled % layer.load[e]), at);
    }
    std::sort(rests.begin(), rests.end());
    for (int64_t i = 0; i < left; i++) slot_weight[rests[static_cast<size_t>(i)].second]++;
  }
}

}  // namespace ep::placement
