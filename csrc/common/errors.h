// The sentence behind an error code, per thread.
#pragma once
#include "../elasticep.h"

namespace ep {
// Stores the sentence and returns `code`, so that callers write `return fail(EP_EINVAL, ...)`.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
}  // namespace ep
