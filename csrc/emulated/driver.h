// Entry points of the emulated driver, by name.
#pragma once

namespace epe {

void* driver_entry(const char* name);

}  // namespace epe
