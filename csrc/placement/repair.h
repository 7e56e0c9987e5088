// Better balance with few moves: one copy more, in the right place, and then tokens split anew.
#pragma once
#include <tuple>

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
    int expert = -1, rank = -1, victim = -1;
  };
  struct Exchange {
    int64_t cost;
    int32_t mine, theirs;  // slots
    bool operator<(const Exchange& o) const {
      return std::tie(cost, mine, theirs) < std::tie(o.cost, o.mine, o.theirs);
    }
  };
  bool try_copies(Layer& layer, int cell, bool bare, int64_t& highest);
  bool try_exchange(Layer& layer, int cell, int64_t target, int64_t& highest);
  bool attempt_exchange(Layer& layer, int cell, const Exchange& trial, int64_t& highest);
  int pick_expert(const Layer& layer, int rank, int64_t wanted) const;
  int pick_victim(const Layer& layer, int rank, bool bare) const;
  bool attempt(Layer& layer, int cell, const Trial& trial, int64_t& highest);

  Flow flow_;
  std::vector<uint8_t> cut_, next_cut_;
};

}  // namespace ep::placement
