// Better balance with few moves: one copy more, in the right place, and then tokens split anew.
#pragma once
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

#include "cover.h"
#include "flow.h"
#include "layer.h"

namespace ep::placement {

class Repair {
 public:
  Repair(const Cluster& cluster, int experts) : flow_(cluster, experts) {}

  // Splits tokens anew; while a rank of `cell` is above `target`, copies an expert out of the set of ranks that is
  // too full to one that is not, into a free slot or over a copy that is not missed; when that does not help,
  // exchanges copies: `frugal` judges each exchange by the split that follows, else whole copies are swapped until
  // no swap helps. `bare`: a copy may be taken from an expert that has just two. Returns copies moved.
  int balance(Layer& layer, int cell, int64_t target, int moves, bool bare, bool frugal);

 private:
  struct Trial {
    int expert, rank;
    int victim;  // slot to be freed first, -1 = there is a free one
    int gone = -1, added = -1;  // what lay there, the slot of the new copy
    Trial(int expert_, int rank_, int victim_) : expert(expert_), rank(rank_), victim(victim_) {}
  };
  struct Exchange {
    int64_t cost;
    int32_t mine, theirs;  // slots
    bool operator<(const Exchange& o) const {
      return std::tie(cost, mine, theirs) < std::tie(o.cost, o.mine, o.theirs);
    }
  };
  int try_copies(Layer& layer, int cell, bool bare, int moves, int64_t& highest);
  int try_batch(Layer& layer, int cell, bool bare, std::size_t most, int64_t& highest);
  void apply(Layer& layer, Trial& trial) const;
  void revert(Layer& layer, const Trial& trial) const;
  bool try_exchange(Layer& layer, int cell, int64_t target, int64_t& highest);
  bool attempt_exchange(Layer& layer, int cell, const Exchange& trial, int64_t& highest);
  int pick_expert(const Layer& layer, int rank, int64_t wanted) const;
  int pick_victim(const Layer& layer, int rank, bool bare) const;
  bool attempt(Layer& layer, int cell, Trial trial, int64_t& highest);

  Flow flow_;
  std::vector<uint8_t> cut_, next_cut_;
  std::vector<std::pair<int64_t, int>> receivers_;  // (load, rank) outside the cut, emptiest first
};

}  // namespace ep::placement
