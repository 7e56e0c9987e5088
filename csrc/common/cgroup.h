// What the cgroups of this process leave it to use.
#pragma once
#include "sys.h"

namespace ep {

// Bytes until the tightest memory limit of this process's cgroup or of one above it; ~0 when there is none.
u64 cgroup_room_bytes();

}  // namespace ep
