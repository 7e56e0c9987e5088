#include "groups.h"

#include <algorithm>
#include <numeric>

namespace ep::placement {
namespace {

struct Nodes {
  std::vector<int64_t> load;   // [nodes]
  std::vector<int64_t> ranks;  // [nodes] open ranks
  std::vector<int> free;       // [nodes] groups that still fit

  // Whether node a with load x per rank is below node b with y: x / ranks[a] < y / ranks[b], exactly.
  bool below(int a, int64_t x, int b, int64_t y) const {
    return static_cast<__int128>(x) * ranks[b] < static_cast<__int128>(y) * ranks[a];
  }
  int highest() const {
    int best = -1;
    for (int n = 0; n < static_cast<int>(load.size()); n++)
      if (ranks[n] > 0 && (best < 0 || below(best, load[best], n, load[n]))) best = n;
    return best;
  }
  double mean_of(int node) const { return static_cast<double>(load[node]) / static_cast<double>(ranks[node]); }
};

// Moves or exchanges groups between the node with the highest mean and another while that lowers the higher one.
void improve(Nodes& nodes, std::vector<int>& node_of, const std::vector<int64_t>& load) {
  const int groups = static_cast<int>(load.size());
  for (int round = 0; round < 4 * groups; round++) {
    const int high = nodes.highest();
    int best_mine = -1, best_theirs = -1, best_node = -1, worst = high;
    int64_t worst_load = nodes.load[high];
    for (int mine = 0; mine < groups; mine++) {
      if (node_of[mine] != high) continue;
      for (int n = 0; n < static_cast<int>(nodes.load.size()); n++) {
        if (n == high || nodes.ranks[n] == 0) continue;
        for (int theirs = -1; theirs < groups; theirs++) {
          if (theirs < 0 ? nodes.free[n] == 0 : node_of[theirs] != n) continue;
          const int64_t gain = load[mine] - (theirs < 0 ? 0 : load[theirs]);
          if (gain <= 0) continue;
          const int64_t here = nodes.load[high] - gain, there = nodes.load[n] + gain;
          const bool other = nodes.below(high, here, n, there);
          const int top = other ? n : high;
          const int64_t top_load = other ? there : here;
          if (!nodes.below(top, top_load, worst, worst_load)) continue;
          worst = top, worst_load = top_load, best_mine = mine, best_theirs = theirs, best_node = n;
        }
      }
    }
    if (best_mine < 0) return;
    const int64_t gain = load[best_mine] - (best_theirs < 0 ? 0 : load[best_theirs]);
    nodes.load[high] -= gain;
    nodes.load[best_node] += gain;
    node_of[best_mine] = best_node;
    if (best_theirs >= 0) {
      node_of[best_theirs] = high;
    } else {
      nodes.free[best_node]--;
      nodes.free[high]++;
    }
  }
}

}  // namespace

bool assign_groups(Layer& layer, int groups, int gain_ppm) {
  const Cluster& cluster = layer.cluster;
  const int size = layer.experts / groups;
  Nodes empty;
  empty.load.assign(cluster.nodes, 0);
  empty.ranks.assign(cluster.nodes, 0);
  empty.free.assign(cluster.nodes, 0);
  int open_nodes = 0, fit = 0;
  for (int rank = 0; rank < cluster.ranks; rank++) {
    if (!cluster.open[rank]) continue;
    empty.ranks[cluster.node[rank]]++;
    empty.free[cluster.node[rank]] += cluster.capacity[rank];
  }
  for (int n = 0; n < cluster.nodes; n++) {
    empty.free[n] /= size;
    fit += empty.free[n];
    open_nodes += empty.ranks[n] > 0;
  }
  if (fit < groups || open_nodes > groups) return false;
  std::vector<int64_t> load(groups, 0);
  for (int e = 0; e < layer.experts; e++) load[e / size] += layer.load[e];

  Nodes fresh = empty;
  std::vector<int> order(groups), fresh_node(groups, -1);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return load[a] > load[b]; });
  for (int g : order) {
    int best = -1;
    for (int n = 0; n < cluster.nodes; n++) {
      if (fresh.free[n] == 0) continue;
      if (best < 0 || fresh.below(n, fresh.load[n] + load[g], best, fresh.load[best] + load[g])) best = n;
    }
    fresh_node[g] = best;
    fresh.load[best] += load[g];
    fresh.free[best]--;
  }
  improve(fresh, fresh_node, load);

  // Where the groups are now, by the tokens that go there.
  Nodes kept = empty;
  std::vector<int> kept_node(groups, -1);
  bool usable = layer.previous != nullptr;
  for (int g = 0; usable && g < groups; g++) {
    std::vector<int64_t> held(cluster.nodes, 0), copies(cluster.nodes, 0);
    for (int e = g * size; e < (g + 1) * size; e++)
      for (int at : layer.where[e]) {
        held[cluster.node[layer.rank_of(at)]] += layer.share[at];
        copies[cluster.node[layer.rank_of(at)]]++;
      }
    int best = -1;
    for (int n = 0; n < cluster.nodes; n++) {
      if (kept.free[n] == 0 || copies[n] == 0) continue;
      if (best < 0 || held[n] > held[best]) best = n;
    }
    if (best < 0) {
      // Its node is gone or full: the emptiest that has room.
      for (int n = 0; n < cluster.nodes; n++)
        if (kept.free[n] > 0 && (best < 0 || kept.below(n, kept.load[n], best, kept.load[best]))) best = n;
    }
    if (best < 0) {
      usable = false;
      break;
    }
    kept_node[g] = best;
    kept.load[best] += load[g];
    kept.free[best]--;
  }
  if (usable) {
    const double now = kept.mean_of(kept.highest()), then = fresh.mean_of(fresh.highest());
    usable = now <= then * (1.0 + gain_ppm * 1e-6);
  }
  const auto& node_of = usable ? kept_node : fresh_node;
  for (int e = 0; e < layer.experts; e++) layer.home[e] = node_of[e / size];
  return true;
}

}  // namespace ep::placement
