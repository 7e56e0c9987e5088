// Vector code for CPUs with AVX2. The headers come first: what they define stays portable.
#include "convert.h"
#include "kernels.h"

#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#pragma GCC target("avx2")
// Nobody looks at floating-point exceptions; loops with selects need that to become vector code.
#pragma GCC optimize("no-trapping-math")
#define EP_KERNELS avx2
#define EP_TABLE avx2_kernels
#define EP_VECTOR_BYTES 32
#define EP_VECTOR __m256i
#define EP_WIDEN(from) _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))
#define EP_STREAM(to, value) _mm256_stream_si256(to, value)
#include "kernels.inc"
#endif
