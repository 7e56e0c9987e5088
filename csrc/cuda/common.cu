// The parts of the core that this library shares by source: it is loaded by itself, without the core library.
#include "../common/bank.cpp"
#include "../common/cgroup.cpp"
#include "../common/errors.cpp"
#include "../common/layout.cpp"
#include "../common/robust.cpp"
#include "../common/link.cpp"
#include "../common/memory.cpp"
