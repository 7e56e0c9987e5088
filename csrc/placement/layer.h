// The state of one layer while it is planned: which copies lie where and how tokens split over them.
//
// Loads are integers scaled so that a layer's total is about 2^45: parts of an expert's load stay exact to far
// below one part in a million, products with 65536 fit into 64 bits, and no result depends on rounding modes.
#pragma once
#include <cstdint>
#include <vector>

namespace ep::placement {

constexpr int64_t kOne = 65536;
constexpr int32_t kEmpty = -1;
constexpr int kIdBits = 16;  // of an expert's id

// The ranks, the same for all layers. A cell is a set of ranks that tokens of an expert may be split over:
// all ranks, or one node under group-limited routing.
struct Cluster {
  int ranks = 0, slots = 0, cells = 1, nodes = 0, domains = 0;
  std::vector<int32_t> capacity, node, domain, cell;  // [ranks]
  std::vector<uint8_t> open;                          // [ranks] 0: draining
  std::vector<std::vector<int>> cell_ranks;           // open ranks of each cell, ascending
  std::vector<int32_t> rank_of;                       // [ranks * slots]
  int open_ranks = 0, open_slots = 0;
  bool plain = false;  // one cell, all ranks open: every copy may take tokens

  void set_cells(bool by_node);
};

class Layer {
 public:
  Layer(const Cluster& cluster, int experts);

  // Starts over: no copies, these loads, `previous` (may be null) as the content that slots hold now.
  void reset(const int64_t* tokens, const int32_t* previous);
  // Puts the previous copies in place with the tokens that `weight` gives them; to be followed by `activate`.
  void adopt(const uint32_t* weight);
  // Once homes are known: takes tokens off copies that should have none; splits evenly what nobody had.
  void activate();
  // Removes all copies; loads and homes stay.
  void clear();
  // Puts back what draining ranks hold: it may be copied from until they leave.
  void adopt_closed();

  int rank_of(int at) const { return cluster.rank_of[at]; }
  bool holds(int expert, int rank) const { return find(expert, rank) >= 0; }
  int find(int expert, int rank) const;
  bool held_before(int expert, int rank) const;
  int room(int rank) const { return cluster.capacity[rank] - used[rank]; }
  int open_copies(int expert) const;

  // Adds a copy in the first free slot of a rank that has one and does not hold the expert.
  int add(int expert, int rank);
  // Removes a copy; its tokens go to the expert's other active copies, to the first of them.
  void remove(int at);
  // Removes all copies on open ranks.
  void drop(int expert);
  // Exchanges the experts of two slots on different ranks; each keeps its tokens.
  void exchange(int a, int b);
  // Orders the slots of every rank so that what stays there keeps its slot, and what is new comes to lie in slots
  // that hold nothing now, where there are any: those can be filled while the old view runs.
  void settle();
  // Recomputes which copies may take tokens, and moves tokens off the others.
  void refresh(int expert);
  void set_share(int at, int64_t tokens) {
    rank_load[cluster.rank_of[at]] += tokens - share[at];
    share[at] = tokens;
  }
  void split_evenly(int expert);

  int64_t max_load() const;
  int moves() const;     // slots whose content differs from what they hold now
  int restored() const;  // of these, experts that no rank holds now

  const Cluster& cluster;
  const int experts;
  int64_t total = 0;
  std::vector<int64_t> load;      // [experts] scaled, >= 1
  std::vector<int32_t> order;     // experts by load, ascending, ties by id
  std::vector<int32_t> home;      // [experts] cell whose ranks take the tokens
  std::vector<int32_t> slot;      // [ranks * slots]
  std::vector<int64_t> share;     // [ranks * slots] tokens of this copy
  std::vector<int64_t> rank_load; // [ranks]
  std::vector<int32_t> used;      // [ranks]
  std::vector<int32_t> first_free;  // [ranks] no slot below this one is free
  std::vector<std::vector<int32_t>> where;   // [experts] slots of all copies
  std::vector<std::vector<int32_t>> active;  // [experts] of these, the ones that may take tokens
  const int32_t* previous = nullptr;
  std::vector<uint8_t> had;       // [experts] some rank holds it now
};

// Scales tokens as the header says and adds one unit each, so that experts without load count, too.
int64_t scale_loads(const int64_t* tokens, int experts, std::vector<int64_t>& out);

// Writes the tables of one layer; weights of each expert sum to exactly 65536.
void write_tables(const Layer& layer, int32_t* slot_expert, uint32_t* slot_weight);

}  // namespace ep::placement
