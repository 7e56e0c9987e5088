#include "cover.h"

#include <algorithm>
#include <queue>
#include <tuple>

namespace ep::placement {
namespace {

constexpr int kMaxTries = 16;  // rearrangements that may fail per layer before only deaths of single ranks count
constexpr int kDistanceBit = 29, kPairBit = 24, kRoomBit = 16;
constexpr int32_t kMostPairs = 31, kTurns = 0xFFFF, kNever = INT32_MAX;

}  // namespace

Cover::Cover(const Cluster& cluster)
    : cluster_(cluster), distance_(static_cast<size_t>(cluster.ranks) * cluster.ranks, 0),
      possible_(cluster.ranks, 0), cost_(distance_.size()), room_cost_(cluster.ranks) {
  for (int a = 0; a < cluster.ranks; a++)
    for (int b = 0; b < cluster.ranks; b++) {
      if (a == b) continue;
      const int apart = 1 + (cluster.node[a] != cluster.node[b]) + (cluster.domain[a] != cluster.domain[b]);
      distance_[static_cast<size_t>(a) * cluster.ranks + b] = static_cast<uint8_t>(apart);
      if (cluster.open[b]) possible_[a] = static_cast<uint8_t>(std::max<int>(possible_[a], apart));
    }
}

// How far from `rank` the copy that is most unlikely to die with it lies.
int Cover::furthest_copy(const Layer& layer, int expert, int rank) const {
  int best = 0;
  for (int at : layer.where[expert])
    if (cluster_.open[layer.rank_of(at)]) best = std::max(best, distance(rank, layer.rank_of(at)));
  return best;
}

void Cover::start(const Layer& layer) {
  for (int a = 0; a < cluster_.ranks; a++) {
    note_room(layer, a);
    for (int b = 0; b < cluster_.ranks; b++) {
      const auto turn = static_cast<int32_t>(b >= a ? b - a : b - a + cluster_.ranks);
      cost_[static_cast<size_t>(a) * cluster_.ranks + b] =
          (3 - distance(a, b)) << kDistanceBit | turn;
    }
  }
  placed_.clear();
}

void Cover::note_room(const Layer& layer, int rank) {
  const int room = std::min(layer.room(rank), 255);
  room_cost_[rank] = cluster_.open[rank] && room > 0 ? (255 - room) << kRoomBit : kNever;
}

void Cover::note_pair(int primary, int rank) {
  int32_t& cost = cost_[static_cast<size_t>(primary) * cluster_.ranks + rank];
  if ((cost >> kPairBit & kMostPairs) < kMostPairs) cost += 1 << kPairBit;
}

bool Cover::any_room() const {
  return std::any_of(room_cost_.begin(), room_cost_.end(), [](int32_t cost) { return cost != kNever; });
}

// The rank with a free slot that lies furthest from `primary`; among equals one whose slot holds the expert now,
// then the one with fewest second copies of this rank's experts, then the emptiest, then the next one round.
int Cover::find_rank(const Layer& layer, int expert, int primary) {
  for (int at : layer.where[expert]) room_cost_[layer.rank_of(at)] = kNever;
  const int32_t* costs = cost_.data() + static_cast<size_t>(primary) * cluster_.ranks;
  int32_t least = kNever;
  for (int rank = 0; rank < cluster_.ranks; rank++) least = std::min(least, costs[rank] | room_cost_[rank]);
  int best = -1;
  if (least != kNever) {
    const int rank = primary + (least & kTurns);
    best = rank < cluster_.ranks ? rank : rank - cluster_.ranks;
  }
  if (best >= 0 && layer.previous && layer.had[expert]) {
    int32_t least_held = kNever;
    for (int rank = 0; rank < cluster_.ranks; rank++) {
      const int32_t cost = costs[rank] | room_cost_[rank];
      if (cost >= least_held || cost >> kDistanceBit != least >> kDistanceBit) continue;
      if (layer.held_before(expert, rank)) best = rank, least_held = cost;
    }
  }
  for (int at : layer.where[expert]) note_room(layer, layer.rank_of(at));
  return best;
}

// Moves a copy that `protect` placed from a rank further than `reach` away to a free slot that suits it as well.
bool Cover::make_way(Layer& layer, int expert, int primary, int reach) {
  for (int32_t& placed : placed_) {
    const int from = layer.rank_of(placed), other = layer.slot[placed];
    if (distance(primary, from) <= reach || layer.holds(expert, from)) continue;
    int holder = -1;
    for (int at : layer.where[other])
      if (at != placed && cluster_.open[layer.rank_of(at)]) holder = layer.rank_of(at);
    for (int to = 0; to < cluster_.ranks; to++) {
      if (!cluster_.open[to] || layer.room(to) == 0 || layer.holds(other, to)) continue;
      if (distance(holder, to) < distance(holder, from)) continue;
      layer.remove(placed);
      placed = layer.add(other, to);
      note_room(layer, from);
      note_room(layer, to);
      return true;
    }
  }
  return false;
}

// Frees a slot on the rank furthest from `primary`, by taking a third or further copy, preferably an unused one.
bool Cover::evict_for(Layer& layer, int expert, int primary) {
  int best = -1;
  std::tuple<int, int, int, int> best_cost;
  for (int at = 0; at < static_cast<int>(layer.slot.size()); at++) {
    const int other = layer.slot[at], rank = layer.rank_of(at);
    if (other < 0 || !cluster_.open[rank] || rank == primary) continue;
    const int copies = layer.open_copies(other);
    if (copies < 3 || layer.holds(expert, rank)) continue;
    const auto cost = std::make_tuple(layer.share[at] > 0, -distance(primary, rank), -copies, at);
    if (best < 0 || cost < best_cost) best = at, best_cost = cost;
  }
  if (best < 0) return false;
  layer.remove(best);
  note_room(layer, layer.rank_of(best));
  return true;
}

// Adds a copy on the least loaded rank with a free slot, at home first; if there is none, in the place of a copy
// that is missed least. `home_only`: nowhere but at home, and no other expert loses its last copy at home for it.
bool Cover::give_copy(Layer& layer, int expert, bool home_only) {
  int best = -1, victim = -1;
  std::tuple<int, int64_t, int> best_cost;
  std::tuple<int, int, int, int, int> victim_cost;
  for (int rank = 0; rank < cluster_.ranks; rank++) {
    const int away = cluster_.cell[rank] != layer.home[expert];
    if (!cluster_.open[rank] || layer.holds(expert, rank) || (home_only && away)) continue;
    if (layer.room(rank) > 0) {
      const auto cost = std::make_tuple(away, layer.rank_load[rank], rank);
      if (best < 0 || cost < best_cost) best = rank, best_cost = cost;
      continue;
    }
    for (int at = rank * cluster_.slots; at < rank * cluster_.slots + cluster_.capacity[rank]; at++) {
      const int other = layer.slot[at], copies = layer.open_copies(other);
      const int last = layer.active[other].size() == 1 && layer.active[other][0] == at;
      if (copies < 2 || (home_only && last)) continue;
      const auto cost = std::make_tuple(away, last, -std::min(copies, 3), static_cast<int>(layer.share[at] > 0), at);
      if (victim < 0 || cost < victim_cost) victim = at, victim_cost = cost;
    }
  }
  if (best < 0 || (victim >= 0 && std::get<0>(best_cost) > std::get<0>(victim_cost))) {
    if (victim < 0) return false;
    best = layer.rank_of(victim);
    layer.remove(victim);
  }
  layer.add(expert, best);
  return true;
}

int Cover::restore(Layer& layer, int moves) {
  int added = 0;
  for (int e = 0; e < layer.experts && added < moves; e++)
    if (layer.open_copies(e) == 0) added += give_copy(layer, e, false);
  for (int e = 0; e < layer.experts && added < moves && cluster_.cells > 1; e++) {
    const auto& active = layer.active[e];
    if (active.empty() || cluster_.cell[layer.rank_of(active[0])] == layer.home[e]) continue;
    added += give_copy(layer, e, true);
  }
  return added;
}

// A rank for the second copy of an expert; rearranges others or takes a surplus copy out if it must.
int Cover::find_for(Layer& layer, int expert, int primary, bool evict, int& tries) {
  int rank = find_rank(layer, expert, primary);
  if (rank >= 0 && distance(primary, rank) < possible_[primary] && tries < kMaxTries) {
    if (make_way(layer, expert, primary, distance(primary, rank))) rank = find_rank(layer, expert, primary);
    else tries++;
  }
  if (rank >= 0) return rank;
  if ((any_room() && make_way(layer, expert, primary, 0)) || (evict && evict_for(layer, expert, primary)))
    rank = find_rank(layer, expert, primary);
  return rank;
}

int Cover::protect(Layer& layer, int moves, bool evict) {
  std::vector<std::pair<int, int>> demands, close;  // (expert, a rank with it): one copy; copies close together
  const int furthest = 1 + (cluster_.nodes > 1) + (cluster_.domains > 1);
  start(layer);
  for (size_t i = layer.order.size(); i-- > 0;) {
    const int e = layer.order[i];
    int primary = -1, copies = 0;
    for (int at : layer.where[e]) {
      if (!cluster_.open[layer.rank_of(at)]) continue;
      if (primary < 0) primary = layer.rank_of(at);
      else note_pair(primary, layer.rank_of(at));
      copies++;
    }
    if (copies == 1) demands.emplace_back(e, primary);
    else if (copies > 1 && furthest > 1 && furthest_copy(layer, e, primary) < possible_[primary])
      close.emplace_back(e, primary);
  }
  int added = 0, tries = 0;
  const auto place = [&](int e, int primary, int rank) {
    note_pair(primary, rank);
    placed_.push_back(layer.add(e, rank));
    note_room(layer, rank);
    added++;
  };
  for (const auto& [e, primary] : demands) {
    if (added >= moves) return added;
    const int rank = find_for(layer, e, primary, evict, tries);
    if (rank >= 0) place(e, primary, rank);
  }
  for (const auto& [e, primary] : close) {
    if (added >= moves) return added;
    const int rank = find_rank(layer, e, primary);
    // A further copy only pays if it lies further away than the ones that there are.
    if (rank >= 0 && distance(primary, rank) > furthest_copy(layer, e, primary)) place(e, primary, rank);
  }
  return added;
}

void Cover::spread_hot(Layer& layer, int64_t tokens) {
  // Tokens per remaining copy if one copy dies, compared as fractions; `left` is at least 1.
  struct Entry {
    int64_t load, left;
    int expert;
    bool operator<(const Entry& other) const {
      const auto mine = static_cast<__int128>(load) * other.left, theirs = static_cast<__int128>(other.load) * left;
      return mine != theirs ? mine < theirs : expert > other.expert;
    }
  };
  std::priority_queue<Entry> hottest;
  for (int e = 0; e < layer.experts; e++) {
    const int left = std::max(1, layer.open_copies(e) - 1);
    if (layer.load[e] > tokens * left) hottest.push({layer.load[e], left, e});
  }
  while (!hottest.empty()) {
    Entry entry = hottest.top();
    hottest.pop();
    int best = -1;
    std::tuple<bool, bool, int, int> best_cost;
    for (int rank = 0; rank < cluster_.ranks; rank++) {
      if (!cluster_.open[rank] || layer.room(rank) == 0 || layer.holds(entry.expert, rank)) continue;
      const auto cost = std::make_tuple(cluster_.cell[rank] != layer.home[entry.expert],
                                        !layer.held_before(entry.expert, rank), -layer.room(rank), rank);
      if (best < 0 || cost < best_cost) best = rank, best_cost = cost;
    }
    if (best < 0) continue;
    layer.add(entry.expert, best);
    entry.left = std::max(1, layer.open_copies(entry.expert) - 1);
    if (entry.load > tokens * entry.left) hottest.push(entry);
  }
}

}  // namespace ep::placement
