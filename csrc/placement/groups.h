// Group-limited routing: every expert group stays inside one node.
#pragma once
#include "layer.h"

namespace ep::placement {

// Sets layer.home (the node of each expert's group). Warm: groups stay where most of their tokens go now, unless
// moving groups lowers the highest node mean by more than `gain_ppm`. Returns false when the open nodes have too
// few slots for whole groups or outnumber the groups; home is then untouched.
bool assign_groups(Layer& layer, int groups, int gain_ppm);

}  // namespace ep::placement
