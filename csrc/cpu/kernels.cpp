#include "kernels.h"

namespace ep {

u32 vector_level() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    return kAvx512;
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kPortable;
}

const Kernels* kernels_of(u32 level) {
  if (level > vector_level()) return nullptr;
#ifdef __x86_64__
  if (level == kAvx512) return &avx512_kernels;
  if (level == kAvx2) return &avx2_kernels;
#endif
  return &portable_kernels;
}

const Kernels& kernels = *kernels_of(vector_level());

}  // namespace ep
