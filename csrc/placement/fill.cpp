#include "fill.h"

#include <algorithm>
#include <tuple>

namespace ep::placement {
namespace {

using Item = std::pair<int64_t, int>;  // (tokens left, expert), ascending: ties by id

struct Window {
  int first = 0, whole = 0;  // items [first, first + whole) go in whole
  int64_t part = 0;          // and so much of the next one
};

enum class Fit { kExact, kAbove, kBelow };

// The lightest window of `whole` full items that is at most `mean` and reaches it with the next item. Where even
// the lightest exceeds the mean it is that one; where even the heaviest stays below, that one and its next item.
Fit find_window(const std::vector<Item>& items, int whole, int64_t mean, Window& window) {
  const int n = static_cast<int>(items.size());
  int64_t sum = 0;
  for (int i = 0; i < whole; i++) sum += items[i].first;
  window = Window{0, whole, 0};
  if (sum > mean) return Fit::kAbove;
  for (int i = 0; i + whole < n; i++) {
    const int64_t next = items[i + whole].first;
    if (sum + next >= mean) {
      window = Window{i, whole, mean - sum};
      return Fit::kExact;
    }
    if (whole > 0) sum += next - items[i].first;
  }
  const int all = std::min(n, whole + 1);
  window = Window{n - all, all, 0};
  return Fit::kBelow;
}

}  // namespace

bool windows_reach_mean(const Cluster& cluster, const std::vector<int>& ranks, std::size_t experts) {
  int64_t room = 0;
  for (int rank : ranks) room += std::max(0, cluster.capacity[rank] - 1);
  return room + 1 >= static_cast<int64_t>(experts);
}

bool fill_windows(const Layer& layer, const std::vector<int>& experts, const std::vector<int>& ranks,
                  std::vector<Bin>& bins) {
  std::vector<Item> items;
  items.reserve(experts.size() + 1);
  int64_t left = 0, room = 0;
  for (int e : experts) {
    items.emplace_back(layer.load[e], e);
    left += layer.load[e];
  }
  bins.resize(ranks.size());
  std::vector<int> capacities;
  for (int rank : ranks) capacities.push_back(layer.cluster.capacity[rank]);
  std::sort(capacities.begin(), capacities.end());
  for (size_t i = 0; i < bins.size(); i++) {
    bins[i].capacity = capacities[i];
    bins[i].parts.clear();
    room += std::max(0, capacities[i] - 1);
  }
  int64_t bins_left = static_cast<int64_t>(bins.size());
  for (Bin& bin : bins) {
    const int n = static_cast<int>(items.size());
    if (n == 0) break;
    if (bin.capacity == 0) {
      bins_left--;
      continue;
    }
    const int64_t mean = (left + bins_left - 1) / bins_left;
    room -= bin.capacity - 1;
    // After this bin the rest must still fit: at most one item more than the others have slots beyond their first.
    const int64_t need = std::max<int64_t>(0, n - 1 - room);
    const int64_t whole = std::min<int64_t>(std::max<int64_t>(need, n / bins_left), bin.capacity - 1);
    Window window;
    if (bins_left == 1) {
      window = Window{0, n, 0};
    } else {
      for (int64_t q = std::min<int64_t>(whole, n - 1); q >= need; q--)
        if (find_window(items, static_cast<int>(q), mean, window) != Fit::kAbove) break;
    }
    if (window.whole + (window.part > 0) > bin.capacity) return false;
    const int end = window.first + window.whole;
    for (int i = window.first; i < end; i++) {
      bin.parts.emplace_back(items[i].second, items[i].first);
      left -= items[i].first;
    }
    Item rest{0, -1};
    int gone = window.whole;
    if (window.part > 0) {
      bin.parts.emplace_back(items[end].second, window.part);
      left -= window.part;
      rest = {items[end].first - window.part, items[end].second};
      gone++;
    }
    items.erase(items.begin() + window.first, items.begin() + window.first + gone);
    if (rest.first > 0) items.insert(std::lower_bound(items.begin(), items.end(), rest), rest);
    bins_left--;
  }
  return items.empty();
}

std::vector<int> interleaved(const Cluster& cluster, const std::vector<int>& ranks) {
  std::vector<int> in_node(cluster.nodes, 0), in_domain(cluster.domains, 0), node_turn(cluster.nodes, -1);
  std::vector<std::tuple<int, int, int, int>> keys;
  for (int rank : ranks) {
    const int node = cluster.node[rank], domain = cluster.domain[rank];
    if (node_turn[node] < 0) node_turn[node] = in_domain[domain]++;
    keys.emplace_back(in_node[node]++, node_turn[node], domain, rank);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<int> ordered;
  for (const auto& key : keys) ordered.push_back(std::get<3>(key));
  return ordered;
}

void place_bins(Layer& layer, const std::vector<int>& ranks, const std::vector<Bin>& bins) {
  std::vector<int> order = interleaved(layer.cluster, ranks);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return layer.cluster.capacity[a] < layer.cluster.capacity[b]; });
  std::vector<int> rank_of_bin(bins.size(), -1);
  if (layer.previous) {
    // Greatest overlap first; what is left over keeps the interleaved order.
    std::vector<std::tuple<int, int, int>> overlaps;  // (-experts in common, bin, position in order)
    for (size_t b = 0; b < bins.size(); b++)
      for (size_t i = 0; i < order.size(); i++) {
        if (layer.cluster.capacity[order[i]] != bins[b].capacity) continue;
        int common = 0;
        for (const auto& part : bins[b].parts) common += layer.held_before(part.first, order[i]);
        if (common > 0) overlaps.emplace_back(-common, static_cast<int>(b), static_cast<int>(i));
      }
    std::sort(overlaps.begin(), overlaps.end());
    for (const auto& [common, b, i] : overlaps) {
      if (rank_of_bin[b] >= 0 || order[i] < 0) continue;
      rank_of_bin[b] = order[i];
      order[i] = -1;
    }
  }
  size_t next = 0;
  for (size_t b = 0; b < bins.size(); b++) {
    int rank = rank_of_bin[b];
    if (rank < 0) {
      while (order[next] < 0) next++;
      rank = order[next++];
    }
    for (const auto& [expert, tokens] : bins[b].parts) {
      const int at = layer.add(expert, rank);
      layer.set_share(at, tokens);
    }
  }
}

}  // namespace ep::placement
