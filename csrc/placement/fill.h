// Window fill: exact balance with at most one split per rank.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "layer.h"

namespace ep::placement {

// What one rank gets; not yet tied to a rank, only to a number of slots.
struct Bin {
  int capacity = 0;
  std::vector<std::pair<int, int64_t>> parts;  // (expert, tokens)
};

// Whether every rank can get exactly the mean: sum over ranks of (slots - 1) >= experts - 1.
bool windows_reach_mean(const Cluster& cluster, const std::vector<int>& ranks, std::size_t experts);

// Fills one bin per rank of `ranks`, ascending by slots, with `experts`, ascending by load. Among these there is always a run of consecutive
// experts plus a part of the next that makes exactly the mean of what is left, and its length can be the average
// number left per rank; the rest of the split expert goes back into the sorted list. With unequal slots a bin may
// have to stay below or above the mean; later bins make up for it. Returns false if slots run out.
bool fill_windows(const Layer& layer, const std::vector<int>& experts, const std::vector<int>& ranks,
                  std::vector<Bin>& bins);

// Ties bins to ranks with the same number of slots: where most of a bin lies already, else so that neighbours in
// the list of bins, which share an expert more often, come to lie in different domains and nodes.
void place_bins(Layer& layer, const std::vector<int>& ranks, const std::vector<Bin>& bins);

// Ranks ordered so that consecutive ones lie in different domains and nodes.
std::vector<int> interleaved(const Cluster& cluster, const std::vector<int>& ranks);

}  // namespace ep::placement
