// Vector code for CPUs with AVX-512 (F, BW, VL, DQ, CD). The headers come first: what they define stays portable.
#include "convert.h"
#include "kernels.h"

#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512cd,prefer-vector-width=512")
// Nobody looks at floating-point exceptions; loops with selects need that to become vector code.
#pragma GCC optimize("no-trapping-math")
#define EP_KERNELS avx512
#define EP_TABLE avx512_kernels
#define EP_VECTOR_BYTES 64
#define EP_VECTOR __m512i
#define EP_WIDEN(from) _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))
#define EP_STREAM(to, value) _mm512_stream_si512(to, value)
#include "kernels.inc"
#endif
