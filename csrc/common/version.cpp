#include "common/export.h"

// The version the library was built from; the loader compares it with the Python package's.
EP_API const char* ep_version() { return EP_VERSION_STRING; }
