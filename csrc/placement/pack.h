// Packing of whole copies, for where windows do not apply: too few slots, or replicas that share evenly.
#pragma once
#include "layer.h"

namespace ep::placement {

// Copies of each expert [experts] (0 for experts outside `experts`) when its replicas share evenly: the copy with
// the most tokens is doubled first, while it has more than `cap`; then experts with one copy get a second; then
// doubling goes on until `slots` are used. At most `most` copies of an expert.
std::vector<int32_t> even_copies(const Layer& layer, const std::vector<int>& experts, int64_t slots, int most,
                                 int64_t cap);

// Copies needed so that no part of an expert exceeds `cap`, as far as `slots` allow, heaviest parts first.
std::vector<int32_t> copies_below(const Layer& layer, const std::vector<int>& experts, int64_t slots, int most,
                                  int64_t cap);

// Places `copies[e]` equal parts of each expert on the ranks: heaviest part first, on the least loaded rank with
// a free slot that does not hold it yet. Parts that find no such rank push another copy aside.
void pack_copies(Layer& layer, const std::vector<int>& experts, const std::vector<int>& ranks,
                 const std::vector<int32_t>& copies);

// Exchanges copies between the most loaded rank and others, or moves one to a free slot, while that lowers the
// higher of the two and the highest rank is above `target`. Returns the number of copies moved; at most `moves`.
int improve_by_swaps(Layer& layer, const std::vector<int>& ranks, int64_t target, int moves);

}  // namespace ep::placement
