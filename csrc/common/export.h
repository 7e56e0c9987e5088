// Marks a function as part of the C ABI; everything else in the library is hidden.
#pragma once

#define EP_API extern "C" __attribute__((visibility("default")))
