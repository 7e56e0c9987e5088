#include "repair.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <tuple>

#include "pack.h"

namespace ep::placement {
namespace {

constexpr int kReceivers = 6;   // ranks tried per copy before giving up
constexpr size_t kBatchRanks = 64;  // ranks per copy that is made before the next split
constexpr int kSwapRounds = 12;  // rounds of exchange and split
constexpr std::size_t kExchanges = 32;  // pairs tried per exchange before giving up

int count(const std::vector<uint8_t>& set) { return static_cast<int>(std::count(set.begin(), set.end(), 1)); }

}  // namespace

// The expert of the full set that can bring `rank` most of what is wanted, the one with fewest copies among equals.
int Repair::pick_expert(const Layer& layer, int rank, int64_t wanted) const {
  int best = -1;
  std::tuple<int64_t, int, int> best_cost;
  for (int from = 0; from < layer.cluster.ranks; from++) {
    if (!cut_[from]) continue;
    const int first = from * layer.cluster.slots;
    for (int at = first; at < first + layer.cluster.capacity[from]; at++) {
      const int e = layer.slot[at];
      if (e < 0 || layer.share[at] == 0) continue;
      const auto cost = std::make_tuple(-std::min(layer.load[e], wanted), static_cast<int>(layer.where[e].size()), e);
      if ((best >= 0 && cost >= best_cost) || layer.holds(e, rank)) continue;
      best = e, best_cost = cost;
    }
  }
  return best;
}

// The copy on `rank` that is missed least: of an expert with most copies, unused ones first.
int Repair::pick_victim(const Layer& layer, int rank, bool bare) const {
  int best = -1;
  std::tuple<int, int64_t, int> best_cost;
  const int first = rank * layer.cluster.slots;
  for (int at = first; at < first + layer.cluster.capacity[rank]; at++) {
    const int e = layer.slot[at];
    if (e < 0) continue;
    const int copies = layer.open_copies(e);
    if (copies < (bare ? 2 : 3)) continue;
    const auto cost = std::make_tuple(-std::min(copies, 3), layer.share[at], at);
    if (best < 0 || cost < best_cost) best = at, best_cost = cost;
  }
  return best;
}

void Repair::apply(Layer& layer, Trial& trial) const {
  if (trial.victim >= 0) {
    trial.gone = layer.slot[trial.victim];
    layer.remove(trial.victim);
  }
  trial.added = layer.add(trial.expert, trial.rank);
}

void Repair::revert(Layer& layer, const Trial& trial) const {
  layer.remove(trial.added);
  if (trial.victim >= 0) layer.add(trial.gone, trial.rank);
}

// Makes the change and splits anew; keeps it if the maximum falls, or if as few ranks are stuck at it as never
// before; else takes it back.
bool Repair::attempt(Layer& layer, int cell, Trial trial, int64_t& highest) {
  apply(layer, trial);
  const int64_t now = flow_.run(layer, cell, next_cut_);
  if (now < highest || (now == highest && count(next_cut_) < count(cut_))) {
    highest = now;
    cut_ = next_cut_;
    return true;
  }
  revert(layer, trial);
  return false;
}

// Many ranks with loads that have little to do with the placement: several copies per split, or it takes seconds.
int Repair::try_batch(Layer& layer, int cell, bool bare, size_t most, int64_t& highest) {
  std::vector<Trial> done;
  for (const auto& [load, rank] : receivers_) {
    if (done.size() == most) break;
    Trial trial{pick_expert(layer, rank, highest - load), rank, -1};
    if (trial.expert < 0) continue;
    if (layer.room(rank) == 0) {
      trial.victim = pick_victim(layer, rank, bare);
      if (trial.victim < 0) continue;
    }
    apply(layer, trial);
    done.push_back(trial);
  }
  const int64_t now = flow_.run(layer, cell, next_cut_);
  if (now < highest) {
    highest = now;
    cut_ = next_cut_;
    return static_cast<int>(done.size());
  }
  while (!done.empty()) {
    revert(layer, done.back());
    done.pop_back();
  }
  return 0;
}

// Returns the copies made, 0 if none helps.
int Repair::try_copies(Layer& layer, int cell, bool bare, int moves, int64_t& highest) {
  const auto& ranks = layer.cluster.cell_ranks[cell];
  receivers_.clear();
  for (int rank : ranks)
    if (!cut_[rank] && layer.rank_load[rank] < highest) receivers_.emplace_back(layer.rank_load[rank], rank);
  std::sort(receivers_.begin(), receivers_.end());
  const size_t batch = std::min<size_t>(ranks.size() / kBatchRanks, static_cast<size_t>(moves));
  if (batch > 1) {
    const int made = try_batch(layer, cell, bare, batch, highest);
    if (made > 0) return made;
  }
  for (const bool over : {false, true}) {
    int tried = 0;
    for (const auto& [load, rank] : receivers_) {
      if (over != (layer.room(rank) == 0)) continue;
      const int victim = over ? pick_victim(layer, rank, bare) : -1;
      const int expert = pick_expert(layer, rank, highest - load);
      if (expert < 0 || (over && victim < 0)) continue;
      if (attempt(layer, cell, Trial{expert, rank, victim}, highest)) return 1;
      if (++tried == kReceivers) break;
    }
  }
  return 0;
}

// Exchanges a copy of the full set with one outside of it, judged by the split that follows. First, exchanges that
// bring an expert of the set to a rank with much room, for a copy that carries little; then those that carry over
// about what the set has too much of.
bool Repair::try_exchange(Layer& layer, int cell, int64_t target, int64_t& highest) {
  const auto& ranks = layer.cluster.cell_ranks[cell];
  int64_t surplus = 0;
  std::vector<int32_t> inside, outside;
  for (int rank : ranks) {
    if (cut_[rank]) surplus += layer.rank_load[rank] - target;
    const int first = rank * layer.cluster.slots;
    for (int at = first; at < first + layer.cluster.capacity[rank]; at++)
      if (layer.slot[at] >= 0) (cut_[rank] ? inside : outside).push_back(at);
  }
  std::vector<Exchange> reach, carry;
  for (int32_t mine : inside)
    for (int32_t theirs : outside) {
      const int64_t gain = layer.share[mine] - layer.share[theirs];
      const int64_t room = highest - layer.rank_load[layer.rank_of(theirs)];
      // The other copies of this expert stay inside: what they carry can follow.
      const int64_t follow = std::min(layer.load[layer.slot[mine]] - layer.share[mine], room) + gain;
      if (follow > 0) reach.push_back({layer.share[theirs] + layer.share[mine] - follow, mine, theirs});
      if (gain > 0) carry.push_back({std::abs(gain - surplus), mine, theirs});
    }
  for (auto* list : {&reach, &carry}) {
    const auto tries = static_cast<std::ptrdiff_t>(std::min(list->size(), kExchanges));
    std::partial_sort(list->begin(), list->begin() + tries, list->end());
    for (std::ptrdiff_t i = 0; i < tries; i++)
      if (attempt_exchange(layer, cell, (*list)[static_cast<std::size_t>(i)], highest)) return true;
  }
  return false;
}

bool Repair::attempt_exchange(Layer& layer, int cell, const Exchange& trial, int64_t& highest) {
  const auto [cost, mine, theirs] = trial;
  if (layer.holds(layer.slot[mine], layer.rank_of(theirs)) || layer.holds(layer.slot[theirs], layer.rank_of(mine)))
    return false;
  layer.exchange(mine, theirs);
  const int64_t now = flow_.run(layer, cell, next_cut_);
  if (now < highest) {
    highest = now;
    cut_ = next_cut_;
    return true;
  }
  layer.exchange(mine, theirs);
  return false;
}

int Repair::balance(Layer& layer, int cell, int64_t target, int moves, bool bare, bool frugal) {
  const auto& ranks = layer.cluster.cell_ranks[cell];
  int64_t highest = flow_.run(layer, cell, cut_);
  int moved = 0;
  const auto wanted = [&](int cost) { return highest > target && moved + cost <= moves; };
  for (int round = 0; round < kSwapRounds && wanted(1); round++) {
    // Every step lowers the maximum or the number of ranks stuck at it; the bound is only a guard.
    for (size_t i = 0; i < 8 * ranks.size() && wanted(1); i++) {
      if (const int made = try_copies(layer, cell, bare, moves - moved, highest)) {
        moved += made;
      } else if (frugal && wanted(2) && try_exchange(layer, cell, target, highest)) {
        moved += 2;
      } else {
        break;
      }
    }
    highest = flow_.run(layer, cell, cut_);
    if (!wanted(1)) break;
    int swapped = improve_by_swaps(layer, ranks, target, moves - moved);
    highest = flow_.run(layer, cell, cut_);
    if (swapped == 0 && !frugal && wanted(2) && try_exchange(layer, cell, target, highest)) swapped = 2;
    if (swapped == 0) break;
    moved += swapped;
  }
  flow_.run(layer, cell, cut_);  // the last attempt may have been taken back
  return moved;
}

}  // namespace ep::placement
