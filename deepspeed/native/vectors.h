// Common code of the products in vectors: sums over the columns in sixteen lanes, which are added in one tree for several
// sums together (4 bits have a form of their own), and prefetching.
#pragma once

#include <algorithm>

#include "products_parts.h"
#include "tiles.h"

#if defined(__x86_64__)
namespace ds {

constexpr int64_t FEW = 4;  // maximum rows for reading a matrix as one memory stream
constexpr int64_t FAR = 4096;  // its prefetch distance in bytes

// -- the lanes of a sum -----------------------------------------------------------------------------------------------

// Sum of the lanes of each of sixteen vectors, by halves as in `added` of products.cpp.
DS_AVX512 static DS_INLINE __m512 add_lanes(const __m512 (&sums)[16]) {
    __m512 fours[4], twos[2];
    for (int i = 0; i < 4; i++) {
        const __m512 a = sums[i], b = sums[i + 4], c = sums[i + 8], d = sums[i + 12];
        const __m512 one = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const __m512 two = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(one, two, 0x88), _mm512_shuffle_f32x4(one, two, 0xdd));
    }
    for (int i = 0; i < 2; i++) {
        const __m512d one = _mm512_castps_pd(fours[2 * i]), two = _mm512_castps_pd(fours[2 * i + 1]);
        twos[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(one, two)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(one, two)));
    }
    return _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
}

// Store the sums of N outputs and R rows.
template <int N, int R>
DS_AVX512 static DS_INLINE void put(const Part& p, int64_t n, int64_t r, const __m512 (&sums)[N][R]) {
    if constexpr (N == 1) {
        for (int j = 0; j < R; j++) p.sums[r + j][n] = _mm512_reduce_add_ps(sums[0][j]);
    } else {
        constexpr int AT_ONCE = 16 / N;
        for (int first = 0; first < R; first += AT_ONCE) {
            __m512 all[16];  // missing sums repeat others
            for (int l = 0; l < 16; l++) all[l] = sums[l % N][std::min(first + l / N, R - 1)];
            alignas(64) float added[16];
            _mm512_store_ps(added, add_lanes(all));
            for (int j = first; j < std::min(R, first + AT_ONCE); j++)
                std::copy_n(added + N * (j - first), N, &p.sums[r + j][n]);
        }
    }
}

// Sum of the lanes of two vectors of eight, in the same order.
DS_AVX2 static DS_INLINE float add_lanes(__m256 low, __m256 high) {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// The same for four sums, whose two vectors are already added.
DS_AVX2 static DS_INLINE __m128 add_lanes(const __m256 (&eight)[4]) {
    __m256 fours[2];
    for (int i = 0; i < 2; i++) {
        const __m256 one = eight[2 * i], two = eight[2 * i + 1];
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(one, two, 0x20), _mm256_permute2f128_ps(one, two, 0x31));
    }
    const __m256 twos = _mm256_add_ps(_mm256_shuffle_ps(fours[0], fours[1], 0x44),
                                      _mm256_shuffle_ps(fours[0], fours[1], 0xee));  // of sums 0, 2 | 1, 3
    const __m128 even = _mm256_castps256_ps128(twos), odd = _mm256_extractf128_ps(twos, 1);
    const __m128 sums = _mm_add_ps(_mm_shuffle_ps(even, odd, 0x88), _mm_shuffle_ps(even, odd, 0xdd));  // 0, 2, 1, 3
    return _mm_permute_ps(sums, 0xd8);
}

// -- memory -----------------------------------------------------------------------------------------------------------

// Prefetch of memory during the steps of a computation, spread evenly over them: a burst would wait for memory.
struct Ahead {
    const char *next, *end;
    int64_t lines, period, wait;  // cache lines at once, steps from one time to the next, steps to the next time
    Ahead(const char* begin, int64_t bytes, int64_t steps) : next(begin), end(begin + bytes), wait(1) {
        const int64_t all = (bytes + 63) / 64;
        steps = std::max<int64_t>(1, steps);
        lines = (all + steps - 1) / steps;
        period = std::clamp<int64_t>(all ? steps / all : steps, 1, steps);
    }
    DS_INLINE void fetch() {
        if (--wait) return;
        wait = period;
        for (int64_t i = 0; i < lines && next < end; i++, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

static DS_INLINE const char* outputs_from(const Part& p, int64_t n) {
    return static_cast<const char*>(p.matrix.weights) + (p.output + n) * row_bytes(p.matrix);
}

// Kernels for integer matrices.
Kernel integer_vectors(Form form);
Kernel unsigned4_vectors();

}  // namespace ds
#endif
