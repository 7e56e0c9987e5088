#include "pack.h"

#include <algorithm>
#include <queue>
#include <set>
#include <tuple>

namespace ep::placement {
namespace {

// (tokens per copy, expert) as fractions compared exactly: a.load / a.copies against b.load / b.copies.
struct Part {
  int64_t load;
  int64_t copies;
  int expert;
  bool operator<(const Part& other) const {
    const auto mine = static_cast<__int128>(load) * other.copies, theirs = static_cast<__int128>(other.load) * copies;
    return mine != theirs ? mine < theirs : expert > other.expert;
  }
};

void place_part(Layer& layer, int expert, int rank, int64_t tokens) {
  const int at = layer.add(expert, rank);
  layer.set_share(at, tokens);
}

void relocate(Layer& layer, int at, int rank) {
  const int expert = layer.slot[at];
  const int64_t tokens = layer.share[at];
  const int to = layer.add(expert, rank);
  layer.set_share(at, 0);
  layer.remove(at);
  layer.set_share(to, tokens);
}

// All ranks with a free slot hold `expert` already: free a slot on a rank that does not hold it, by moving one of
// its copies to a rank with room.
bool push_aside(Layer& layer, const std::vector<int>& ranks, int expert, int64_t tokens) {
  for (int roomy : ranks) {
    if (layer.room(roomy) == 0) continue;
    for (int full : ranks) {
      if (layer.holds(expert, full)) continue;
      const int first = full * layer.cluster.slots;
      for (int at = first; at < first + layer.cluster.capacity[full]; at++) {
        if (layer.slot[at] < 0 || layer.holds(layer.slot[at], roomy)) continue;
        relocate(layer, at, roomy);
        place_part(layer, expert, full, tokens);
        return true;
      }
    }
  }
  return false;
}

struct Swap {
  int64_t highest = 0;  // of the two ranks, afterwards
  int mine = -1, theirs = -1, rank = -1;
};

// The best exchange between the rank `high` and `low`; `theirs` = -1 moves a copy into a free slot.
void find_swap(const Layer& layer, int high, int low, Swap& best) {
  const int64_t high_load = layer.rank_load[high], low_load = layer.rank_load[low];
  if (low_load >= high_load) return;
  const int slots = layer.cluster.slots;
  const int high_end = high * slots + layer.cluster.capacity[high];
  const int low_end = low * slots + layer.cluster.capacity[low];
  for (int a = high * slots; a < high_end; a++) {
    if (layer.slot[a] < 0 || layer.share[a] == 0) continue;
    const int64_t mine = layer.share[a];
    bool checked = false, allowed = false;
    const int64_t free = layer.room(low) > 0;
    for (int b = low * slots - free; b < low_end; b++) {
      const bool into_free = b < low * slots;
      if (!into_free && layer.slot[b] < 0) continue;
      const int64_t gain = mine - (into_free ? 0 : layer.share[b]);
      const int64_t highest = std::max(high_load - gain, low_load + gain);
      if (highest >= best.highest) continue;
      if (!checked) allowed = !layer.holds(layer.slot[a], low), checked = true;
      if (!allowed) break;
      if (!into_free && layer.holds(layer.slot[b], high)) continue;
      best = Swap{highest, a, into_free ? -1 : b, low};
    }
  }
}

}  // namespace

std::vector<int32_t> even_copies(const Layer& layer, const std::vector<int>& experts, int64_t slots, int most,
                                 int64_t cap) {
  std::vector<int32_t> copies = copies_below(layer, experts, slots, most, cap);
  int64_t left = slots;
  std::priority_queue<Part> heaviest;
  std::vector<std::pair<int64_t, int>> single;
  for (int e : experts) {
    left -= copies[e];
    if (copies[e] == 1 && most > 1) single.emplace_back(-layer.load[e], e);
  }
  std::sort(single.begin(), single.end());
  for (size_t i = 0; i < single.size() && left > 0; i++, left--) copies[single[i].second] = 2;
  for (int e : experts) heaviest.push({layer.load[e], copies[e], e});
  while (left > 0 && !heaviest.empty()) {
    Part part = heaviest.top();
    heaviest.pop();
    if (part.copies >= most) continue;
    copies[part.expert] = static_cast<int32_t>(++part.copies);
    heaviest.push(part);
    left--;
  }
  return copies;
}

std::vector<int32_t> copies_below(const Layer& layer, const std::vector<int>& experts, int64_t slots, int most,
                                  int64_t cap) {
  std::vector<int32_t> copies(layer.experts, 0);
  std::priority_queue<Part> heaviest;
  int64_t left = slots - static_cast<int64_t>(experts.size());
  for (int e : experts) {
    copies[e] = 1;
    if (layer.load[e] > cap) heaviest.push({layer.load[e], 1, e});
  }
  while (left > 0 && !heaviest.empty()) {
    Part part = heaviest.top();
    heaviest.pop();
    if (part.copies >= most || part.load / part.copies <= cap) continue;
    copies[part.expert] = static_cast<int32_t>(++part.copies);
    heaviest.push(part);
    left--;
  }
  return copies;
}

void pack_copies(Layer& layer, const std::vector<int>& experts, const std::vector<int>& ranks,
                 const std::vector<int32_t>& copies) {
  std::vector<Part> parts;
  for (int e : experts) parts.push_back({layer.load[e], std::max(1, copies[e]), e});
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return b < a; });
  std::set<std::pair<int64_t, int>> open;  // (load, position in ranks), ranks with a free slot
  for (size_t i = 0; i < ranks.size(); i++)
    if (layer.room(ranks[i]) > 0) open.emplace(layer.rank_load[ranks[i]], static_cast<int>(i));
  for (const Part& part : parts)
    for (int64_t copy = 0; copy < part.copies; copy++) {
      const int64_t tokens = part.load * (copy + 1) / part.copies - part.load * copy / part.copies;
      auto it = open.begin();
      while (it != open.end() && layer.holds(part.expert, ranks[it->second])) ++it;
      if (it != open.end()) {
        const int i = it->second;
        open.erase(it);
        place_part(layer, part.expert, ranks[i], tokens);
        if (layer.room(ranks[i]) > 0) open.emplace(layer.rank_load[ranks[i]], i);
      } else if (push_aside(layer, ranks, part.expert, tokens)) {
        open.clear();
        for (size_t i = 0; i < ranks.size(); i++)
          if (layer.room(ranks[i]) > 0) open.emplace(layer.rank_load[ranks[i]], static_cast<int>(i));
      } else {
        // No rank is left for it: its tokens stay with its other copies.
        layer.split_evenly(part.expert);
        break;
      }
    }
}

int improve_by_swaps(Layer& layer, const std::vector<int>& ranks, int64_t target, int moves) {
  std::vector<int> by_load(ranks);
  int moved = 0;
  // Every exchange lowers the sorted list of rank loads; the bound is only a guard against crawling.
  for (size_t round = 0; round < 16 * ranks.size() && moved + 1 <= moves; round++) {
    std::sort(by_load.begin(), by_load.end(), [&](int a, int b) {
      return std::make_pair(layer.rank_load[a], a) < std::make_pair(layer.rank_load[b], b);
    });
    const int high = by_load.back();
    if (layer.rank_load[high] <= target) break;
    Swap best;
    best.highest = layer.rank_load[high];
    for (size_t i = 0; i + 1 < by_load.size(); i++) {
      if (best.mine >= 0 && i >= 8) break;  // the least loaded ranks offer most
      find_swap(layer, high, by_load[i], best);
    }
    if (best.mine < 0 || moved + (best.theirs >= 0 ? 2 : 1) > moves) break;
    if (best.theirs < 0) {
      relocate(layer, best.mine, best.rank);
      moved++;
    } else {
      layer.exchange(best.mine, best.theirs);
      moved += 2;
    }
  }
  return moved;
}

}  // namespace ep::placement
