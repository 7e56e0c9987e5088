#include "errors.h"

#include <cstdarg>
#include <cstdio>

namespace {
thread_local char sentence[512];
}

namespace ep {
int fail(int code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(sentence, sizeof sentence, format, args);
  va_end(args);
  return code;
}
}  // namespace ep

const char* ep_last_error(void) { return sentence; }
