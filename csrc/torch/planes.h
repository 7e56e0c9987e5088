// The calls that an operator makes, for the core and for the CUDA library.
#pragma once
#include "target.h"

namespace ept {

// Both copy what they need of `spec`. CUDA: *code is what received_of answered.
std::unique_ptr<Plane> cpu_plane(const ept_exchange& spec);
std::unique_ptr<Plane> cuda_plane(const ept_exchange& spec, std::vector<Channel>& channels, int* code);

}  // namespace ept
