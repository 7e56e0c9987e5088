// Coverage: copies placed so that no single death leaves an expert without one.
#pragma once
#include <cstddef>

#include "layer.h"

namespace ep::placement {

class Cover {
 public:
  explicit Cover(const Cluster& cluster);

  // Gives experts without a copy on an open rank one, in their home cell where a slot can be had, then experts with
  // copies elsewhere only one at home; surplus copies of others make room if need be. Returns the copies added; at
  // most `moves`.
  int restore(Layer& layer, int moves);

  // Gives experts with one copy a second one, in another domain and node where possible, then experts whose copies
  // all lie in one node one elsewhere. The second copies of what one rank holds are spread over all others. Uses
  // free slots, and with `evict` those of third and further copies.
  int protect(Layer& layer, int moves, bool evict);

  // Adds copies of the experts whose death of one copy would leave most tokens per copy, while that is above
  // `tokens` and there are free slots.
  void spread_hot(Layer& layer, int64_t tokens);

 private:
  // 0: this rank; 1: same node and domain; 2: another node or domain; 3: both differ.
  int distance(int a, int b) const { return distance_[static_cast<size_t>(a) * cluster_.ranks + b]; }
  int furthest_copy(const Layer& layer, int expert, int rank) const;
  bool give_copy(Layer& layer, int expert, bool home_only);
  int find_rank(const Layer& layer, int expert, int primary);
  bool make_way(Layer& layer, int expert, int primary, int reach);
  bool evict_for(Layer& layer, int expert, int primary);
  bool any_room() const;
  int find_for(Layer& layer, int expert, int primary, bool evict, int& tries);
  void start(const Layer& layer);
  void note_room(const Layer& layer, int rank);
  void note_pair(int primary, int rank);

  const Cluster& cluster_;
  std::vector<uint8_t> distance_;  // [ranks][ranks]
  std::vector<uint8_t> possible_;  // [ranks] greatest distance to an open rank
  // The cost of a second copy on rank b of what rank a holds is cost_[a][b] | room_cost_[b], in fields from the
  // highest bit down: 3 - distance, second copies of a's experts on b, 255 - free slots, turns round from a to b.
  std::vector<int32_t> cost_;       // [ranks][ranks]
  std::vector<int32_t> room_cost_;  // [ranks] all ones when there is no free slot
  std::vector<int32_t> placed_;    // slots filled by `protect`, still to be moved at no cost
};

}  // namespace ep::placement
