// Vector code for any CPU.
#include "convert.h"
#include "kernels.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

// Nobody looks at floating-point exceptions; loops with selects need that to become vector code.
#pragma GCC optimize("no-trapping-math")
#define EP_KERNELS portable
#define EP_TABLE portable_kernels
#define EP_VECTOR_BYTES 16
#ifdef __SSE2__
#define EP_VECTOR __m128i
#define EP_STREAM(to, value) _mm_stream_si128(to, value)
#endif
#include "kernels.inc"
