#include "elasticep.h"

// The release this library was built from. The loader compares it with the Python package's before it
// trusts any other function, so it stands outside the ABI that `ep_abi_version` counts.
extern "C" EP_API const char* ep_version(void) { return EP_VERSION_STRING; }
