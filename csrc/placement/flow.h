// Re-split: the weights that minimise the highest rank load on given copies. Moves no bytes.
#pragma once
#include "layer.h"

namespace ep::placement {

// Tokens of an expert may go to any of its active copies, so the least maximum is a parametric maximum flow
// (ranks that hold too much -> experts -> ranks that hold too little). Starts from the shares that are there.
class Flow {
 public:
  Flow(const Cluster& cluster, int experts);

  // Balances the open ranks of `cell`. Returns the least possible maximum. `cut` [ranks] marks the set that
  // explains it: ranks whose tokens have no copy outside the set; empty when the maximum is the mean.
  int64_t run(Layer& layer, int cell, std::vector<uint8_t>& cut);

 private:
  bool find_levels(const Layer& layer, const std::vector<int>& ranks);
  int64_t push(Layer& layer, int rank, int64_t amount);

  std::vector<int32_t> level_, next_slot_, queue_;  // [ranks]
  std::vector<int32_t> expert_level_, next_copy_;   // [experts]
  int64_t cap_ = 0;
  int32_t sink_level_ = 0;
};

}  // namespace ep::placement
