#include "planner.h"

#include <algorithm>
#include <climits>
#include <cstdint>

#include "fill.h"
#include "groups.h"
#include "pack.h"

namespace ep::placement {
namespace {

constexpr int64_t kExactPpm = 200;  // a fresh placement within this of the mean is not worked on further

Cluster make_cluster(const ep_placement_problem& p) {
  Cluster c;
  c.ranks = p.ranks;
  c.slots = p.slots;
  c.capacity.assign(p.rank_slots, p.rank_slots + p.ranks);
  c.node.assign(p.rank_node, p.rank_node + p.ranks);
  c.domain.assign(p.rank_domain, p.rank_domain + p.ranks);
  c.open.resize(p.ranks);
  c.rank_of.resize(static_cast<size_t>(p.ranks) * p.slots);
  // When all ranks drain, none can take tokens off another: they carry on as they are.
  const bool all_closed = std::count(p.rank_closed, p.rank_closed + p.ranks, 0) == 0;
  for (int rank = 0; rank < p.ranks; rank++) {
    c.open[rank] = all_closed || !p.rank_closed[rank];
    c.nodes = std::max(c.nodes, c.node[rank] + 1);
    c.domains = std::max(c.domains, c.domain[rank] + 1);
    if (c.open[rank]) c.open_slots += c.capacity[rank];
    c.open_ranks += c.open[rank];
    for (int s = 0; s < p.slots; s++) c.rank_of[rank * p.slots + s] = rank;
  }
  c.set_cells(false);
  return c;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Planner::Planner(const ep_placement_problem& problem)
    : problem_(problem), cluster_(make_cluster(problem)), layer_(cluster_, problem.experts),
      repair_(cluster_, problem.experts), cover_(cluster_) {
  if (problem.groups < 2) return;
  // Whether whole groups fit into nodes depends on sizes only, so any loads will do to find out.
  layer_.reset(problem.loads, nullptr);
  cluster_.set_cells(true);
  grouped_ = assign_groups(layer_, problem.groups, problem.gain_ppm);
  if (!grouped_) cluster_.set_cells(false);
}

// The cell whose ranks take this expert's tokens; its home unless no copy is there.
int Planner::cell_of(int expert) const {
  const auto& active = layer_.active[expert];
  return active.empty() ? layer_.home[expert] : cluster_.cell[layer_.rank_of(active[0])];
}

int64_t Planner::cell_load(int cell) const {
  int64_t sum = 0;
  for (int rank : cluster_.cell_ranks[cell]) sum += layer_.rank_load[rank];
  return sum;
}

int64_t Planner::target_of(int cell, int64_t ppm) const {
  const auto ranks = static_cast<int64_t>(cluster_.cell_ranks[cell].size());
  if (ranks == 0) return 0;
  const int64_t mean = ceil_div(cell_load(cell), ranks);
  return mean + mean / 1000000 * ppm;
}

bool Planner::misses_target() const {
  for (int cell = 0; cell < cluster_.cells; cell++) {
    const int64_t target = target_of(cell, problem_.target_ppm);
    for (int rank : cluster_.cell_ranks[cell])
      if (layer_.rank_load[rank] > target) return true;
  }
  return false;
}

// From the previous placement, already adopted: what is lost or bare first, then balance.
void Planner::warm(int moves) {
  if (moves > 0) moves -= cover_.restore(layer_, moves);
  if (moves > 0 && problem_.cover) moves -= cover_.protect(layer_, moves, true);
  const bool bare = !problem_.cover || cluster_.open_slots < 2 * layer_.experts;
  for (int cell = 0; cell < cluster_.cells; cell++)
    moves -= repair_.balance(layer_, cell, target_of(cell, problem_.target_ppm), moves, bare, true);
}

// The same for replicas that share evenly: whole copies are exchanged.
void Planner::keep_even(int moves) {
  if (moves > 0) moves -= cover_.restore(layer_, moves);
  for (int e = 0; e < layer_.experts; e++) layer_.split_evenly(e);
  for (int cell = 0; cell < cluster_.cells; cell++)
    moves -= improve_by_swaps(layer_, cluster_.cell_ranks[cell], target_of(cell, problem_.target_ppm), moves);
}

int64_t Planner::highest(int cell) const {
  int64_t most = 0;
  for (int rank : cluster_.cell_ranks[cell]) most = std::max(most, layer_.rank_load[rank]);
  return most;
}

void Planner::fresh_cell(int cell) {
  std::vector<int> experts;
  int64_t sum = 0;
  for (int e : layer_.order)
    if (layer_.home[e] == cell) experts.push_back(e), sum += layer_.load[e];
  if (experts.empty()) return;
  const int64_t mean = ceil_div(sum, static_cast<int64_t>(cluster_.cell_ranks[cell].size()));
  if (problem_.weighted) build_weighted(experts, cell, mean);
  else build_even(experts, cell, mean);
}

// By windows where they can reach the mean; where they do not, whole copies first, and the better of the two.
void Planner::build_weighted(const std::vector<int>& experts, int cell, int64_t mean) {
  const auto& ranks = cluster_.cell_ranks[cell];
  const int64_t target = mean + mean / 1000000 * kExactPpm;
  std::vector<Bin> bins;
  const auto by_windows = [&] {
    place_bins(layer_, ranks, bins);
    repair_.balance(layer_, cell, target, INT_MAX, true, false);
    return highest(cell);
  };
  const auto by_copies = [&] {
    pack_copies(layer_, experts, ranks, copies_below(layer_, experts, slots_of(cell), holders_of(cell), mean));
    repair_.balance(layer_, cell, target, INT_MAX, true, false);
    return highest(cell);
  };
  if (!windows_reach_mean(cluster_, ranks, experts.size()) || !fill_windows(layer_, experts, ranks, bins)) {
    by_copies();
    return;
  }
  const int64_t windows = by_windows();
  if (windows <= target) return;
  for (int e : experts) layer_.drop(e);
  if (by_copies() <= windows) return;
  for (int e : experts) layer_.drop(e);
  by_windows();
}

// The number of copies trades balance for coverage: of three ways to choose it, the one that covers most among
// those within a hundredth of the best balance.
void Planner::build_even(const std::vector<int>& experts, int cell, int64_t mean) {
  const auto& ranks = cluster_.cell_ranks[cell];
  const auto build = [&](int64_t cap) {
    for (int e : experts) layer_.drop(e);
    pack_copies(layer_, experts, ranks, even_copies(layer_, experts, slots_of(cell), holders_of(cell), cap));
    improve_by_swaps(layer_, ranks, mean, INT_MAX);
    return highest(cell);
  };
  const int64_t best = build(0);
  if (!problem_.cover || best == 0) return;
  for (const int64_t cap : {INT64_MAX, mean / 2})
    if (build(cap) <= best + best / 100) return;
  build(0);
}

int64_t Planner::slots_of(int cell) const {
  int64_t slots = 0;
  for (int rank : cluster_.cell_ranks[cell]) slots += cluster_.capacity[rank];
  return slots;
}

// Ranks of the cell that have a slot at all: the most copies that an expert can have.
int Planner::holders_of(int cell) const {
  int count = 0;
  for (int rank : cluster_.cell_ranks[cell]) count += cluster_.capacity[rank] > 0;
  return count;
}

void Planner::fresh() {
  layer_.clear();
  layer_.adopt_closed();
  for (int cell = 0; cell < cluster_.cells; cell++) fresh_cell(cell);
  if (!problem_.weighted) return;
  if (problem_.cover) cover_.protect(layer_, INT_MAX, false);
  if (problem_.cover) cover_.spread_hot(layer_, layer_.total / cluster_.open_ranks / 2);
  if (problem_.fill) cover_.spread_hot(layer_, 0);
}

// What no placement of these experts on these slots can be below, in scaled tokens.
int64_t Planner::bound() const {
  const int64_t n = cluster_.open_ranks, slots = cluster_.open_slots;
  int64_t low = ceil_div(layer_.total, n);
  // With a maximum of T an expert needs load / T copies; all together there are `slots`.
  const auto fits = [&](int64_t cap) {
    int64_t needed = 0;
    for (int64_t tokens : layer_.load) needed += ceil_div(tokens, cap);
    return needed <= slots;
  };
  low = std::max(low, crowding());
  if (!fits(low)) {
    int64_t high = *std::max_element(layer_.load.begin(), layer_.load.end());
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (fits(middle)) high = middle;
      else low = middle + 1;
    }
  }
  return low;
}

// Some rank takes at least a c-th of the heaviest expert when that has c copies. If slots are scarce, the other
// slots of this rank cannot all be empty or hold experts with further copies: the rest are at least the lightest.
int64_t Planner::crowding() const {
  const int64_t heaviest = *std::max_element(layer_.load.begin(), layer_.load.end());
  int64_t least_slots = INT64_MAX;
  for (int rank = 0; rank < cluster_.ranks; rank++)
    if (cluster_.open[rank] && cluster_.capacity[rank] > 0)
      least_slots = std::min<int64_t>(least_slots, cluster_.capacity[rank]);
  const int64_t spare = cluster_.open_slots - layer_.experts;
  std::vector<int64_t> sorted;
  int64_t low = heaviest;
  for (int64_t copies = 1; copies <= std::min<int64_t>(spare + 1, cluster_.open_ranks); copies++) {
    int64_t tokens = ceil_div(heaviest, copies);
    const int64_t sole = std::min<int64_t>(least_slots - 1 - (spare - copies + 1), layer_.experts - 1);
    if (sole > 0 && sorted.empty()) {
      sorted = layer_.load;
      std::sort(sorted.begin(), sorted.end());
    }
    for (int64_t i = 0; i < sole; i++) tokens += sorted[i];
    low = copies == 1 ? tokens : std::min(low, tokens);
    if (low <= layer_.total / cluster_.open_ranks) break;
  }
  return low;
}

// Highest rank load over the mean, from the tables as they are returned.
double Planner::measure(const int32_t* slot_expert, const uint32_t* slot_weight) const {
  double highest = 0.0;
  for (int rank = 0; rank < cluster_.ranks; rank++) {
    double sum = 0.0;
    for (int at = rank * cluster_.slots; at < (rank + 1) * cluster_.slots; at++)
      if (slot_weight[at] > 0)
        sum += static_cast<double>(layer_.load[slot_expert[at]]) * (static_cast<double>(slot_weight[at]) / kOne);
    highest = std::max(highest, sum);
  }
  return highest * cluster_.open_ranks / static_cast<double>(layer_.total);
}

void Planner::describe(ep_placement_layer& report) const {
  report.moves = layer_.moves();
  report.restored = layer_.restored();
  report.lost = report.single = report.same_node = report.spilled = 0;
  report.global = problem_.groups > 1 && !grouped_;
  for (int e = 0; e < layer_.experts; e++) {
    const auto& where = layer_.where[e];
    const int copies = layer_.open_copies(e);
    report.lost += where.empty();
    report.single += copies == 1;
    bool apart = false;
    for (int at : where) apart |= cluster_.node[layer_.rank_of(at)] != cluster_.node[layer_.rank_of(where[0])];
    report.same_node += !where.empty() && !apart;
    report.spilled += grouped_ && !where.empty() && cell_of(e) != layer_.home[e];
  }
}

void Planner::run(int index, int32_t* slot_expert, uint32_t* slot_weight, ep_placement_layer& report) {
  const size_t cells = static_cast<size_t>(cluster_.ranks) * cluster_.slots;
  const int32_t* previous = problem_.previous_expert ? problem_.previous_expert + index * cells : nullptr;
  const uint32_t* weight = problem_.previous_weight ? problem_.previous_weight + index * cells : nullptr;
  const int moves = !problem_.moves_allowed ? 0 : problem_.layer_moves ? problem_.layer_moves[index] : INT_MAX;
  layer_.reset(problem_.loads + static_cast<int64_t>(index) * problem_.experts, previous);
  if (previous) layer_.adopt(problem_.weighted ? weight : nullptr);
  if (grouped_) assign_groups(layer_, problem_.groups, problem_.gain_ppm);
  report = ep_placement_layer{};
  const double scale = static_cast<double>(cluster_.open_ranks) / static_cast<double>(layer_.total);
  report.bound = static_cast<double>(bound()) * scale;
  if (!previous) {
    fresh();
    report.method = EP_PLACEMENT_FRESH;
  } else {
    layer_.activate();
    report.before = static_cast<double>(layer_.max_load()) * scale;
    if (problem_.weighted) warm(moves);
    else keep_even(moves);
    report.method = layer_.moves() ? EP_PLACEMENT_REPAIRED : EP_PLACEMENT_KEPT;
  }
  layer_.settle();
  write_tables(layer_, slot_expert, slot_weight);
  report.after = measure(slot_expert, slot_weight);
  describe(report);
  if (!previous || moves == 0 || !misses_target()) return;

  // Repair was not enough. Is a new placement so much better that it pays to move more?
  fresh();
  layer_.settle();
  std::vector<int32_t> new_expert(cells);
  std::vector<uint32_t> new_weight(cells);
  write_tables(layer_, new_expert.data(), new_weight.data());
  const double after = measure(new_expert.data(), new_weight.data());
  if (layer_.moves() > moves || after * (1.0 + problem_.gain_ppm * 1e-6) >= report.after) return;
  std::copy(new_expert.begin(), new_expert.end(), slot_expert);
  std::copy(new_weight.begin(), new_weight.end(), slot_weight);
  report.after = after;
  report.method = EP_PLACEMENT_FRESH;
  describe(report);
}

int32_t check_problem(const ep_placement_problem& p) {
  constexpr int32_t kMost = 1 << 20, kMostRanks = 1 << 16, kMostExperts = 1 << kIdBits;
  if (p.layers < 0 || p.experts < 1 || p.ranks < 1 || p.slots < 1 || p.layers > kMost || p.experts > kMostExperts ||
      p.ranks > kMostRanks || p.slots > kMost || static_cast<int64_t>(p.ranks) * p.slots > INT32_MAX / 4)
    return EP_PLACEMENT_ARGUMENT;
  if (!p.loads || !p.rank_slots || !p.rank_node || !p.rank_domain || !p.rank_closed) return EP_PLACEMENT_ARGUMENT;
  if (!p.previous_expert && (p.previous_weight || !p.moves_allowed)) return EP_PLACEMENT_ARGUMENT;
  if (p.groups < 1 || p.experts % p.groups || p.target_ppm < 0 || p.gain_ppm < 0) return EP_PLACEMENT_ARGUMENT;
  int64_t open_slots = 0;
  for (int rank = 0; rank < p.ranks; rank++) {
    if (p.rank_slots[rank] < 0 || p.rank_slots[rank] > p.slots) return EP_PLACEMENT_ARGUMENT;
    if (p.rank_node[rank] < 0 || p.rank_node[rank] >= p.ranks) return EP_PLACEMENT_ARGUMENT;
    if (p.rank_domain[rank] < 0 || p.rank_domain[rank] >= p.ranks) return EP_PLACEMENT_ARGUMENT;
    if (!p.rank_closed[rank]) open_slots += p.rank_slots[rank];
  }
  if (p.moves_allowed && open_slots < p.experts) return EP_PLACEMENT_SLOTS;
  for (int64_t i = 0; i < static_cast<int64_t>(p.layers) * p.experts; i++)
    if (p.loads[i] < 0) return EP_PLACEMENT_ARGUMENT;
  if (!p.previous_expert) return EP_PLACEMENT_OK;
  std::vector<int64_t> seen(p.experts, -1);
  const int64_t rows = static_cast<int64_t>(p.layers) * p.ranks;
  for (int64_t row = 0; row < rows; row++)
    for (int s = 0; s < p.slots; s++) {
      const int64_t at = row * p.slots + s;
      const int32_t expert = p.previous_expert[at];
      if (p.previous_weight && p.previous_weight[at] > kOne) return EP_PLACEMENT_PREVIOUS;
      if (expert < 0) continue;
      if (expert >= p.experts || seen[expert] == row) return EP_PLACEMENT_PREVIOUS;
      seen[expert] = row;
    }
  return EP_PLACEMENT_OK;
}

}  // namespace ep::placement

EP_PLACEMENT_API int32_t ep_placement_plan(const ep_placement_problem* problem, int32_t* slot_expert,
                                           uint32_t* slot_weight, ep_placement_layer* report) {
  if (!problem || !slot_expert || !slot_weight || !report) return EP_PLACEMENT_ARGUMENT;
  const int32_t status = ep::placement::check_problem(*problem);
  if (status != EP_PLACEMENT_OK) return status;
  ep::placement::Planner planner(*problem);
  const size_t cells = static_cast<size_t>(problem->ranks) * problem->slots;
  for (int layer = 0; layer < problem->layers; layer++)
    planner.run(layer, slot_expert + layer * cells, slot_weight + layer * cells, report[layer]);
  return EP_PLACEMENT_OK;
}

EP_PLACEMENT_API int32_t ep_placement_problem_size(void) { return sizeof(ep_placement_problem); }
EP_PLACEMENT_API int32_t ep_placement_layer_size(void) { return sizeof(ep_placement_layer); }
