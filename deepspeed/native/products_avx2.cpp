// AVX2 products of matrices of all forms: the lanes, and the order of their sum, are those of products.cpp.
#include <algorithm>
#include <cstring>

#include "vectors.h"

#if defined(__x86_64__)
namespace ds {

// -- the lanes of a sum: two vectors of eight -------------------------------------------------------------------------

// Sum of sixteen lanes, by halves as in `added` of products.cpp.
DS_AVX2 static DS_INLINE float add_lanes(__m256 low, __m256 high) {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// -- floating-point numbers -------------------------------------------------------------------------------------------

struct WholeLanes {
    static constexpr int64_t STEP = 16, BYTES = 4;
    using Line = __m256;
    static DS_INLINE const float* rows(const Part& p) { return p.x.plain; }
    static DS_INLINE int64_t stride(const Part& p) { return p.matrix.inputs; }
    DS_AVX2 static DS_INLINE Line load(const char* w, int half) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(w) + 8 * half);
    }
    DS_AVX2 static DS_INLINE __m256 add(__m256 sum, const Line& w, const float* x, int half) {
        return _mm256_fmadd_ps(w, _mm256_loadu_ps(x + 8 * half), sum);
    }
};

// bf16, with rows in the order of `round_to_wide`; products of two bf16 values are exact.
struct HalfLanes {
    static constexpr int64_t STEP = 32, BYTES = 2;
    struct Line {
        __m256 even, odd;
    };
    static DS_INLINE const float* rows(const Part& p) { return reinterpret_cast<const float*>(p.x.values.data()); }
    static DS_INLINE int64_t stride(const Part& p) { return p.x.padded; }
    DS_AVX2 static DS_INLINE Line load(const char* w, int half) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + half);
        const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
    }
    DS_AVX2 static DS_INLINE __m256 add(__m256 sum, const Line& w, const float* x, int half) {
        sum = _mm256_fmadd_ps(w.even, _mm256_loadu_ps(x + 8 * half), sum);
        return _mm256_fmadd_ps(w.odd, _mm256_loadu_ps(x + 16 + 8 * half), sum);
    }
};

void round_to_pairs(const float* x, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i / 32 * 32 + i % 2 * 16 + i % 32 / 2] = from_bf16(to_bf16(x[i]));
}

// A step of N outputs and R rows.
template <class Lanes, int N, int R>
DS_AVX2 static DS_INLINE void floating_step(__m256 (&sums)[N][R][2], const char* w, int64_t bytes, const float* x,
                                            int64_t stride) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < N; i++) {
            const auto line = Lanes::load(w + i * bytes, half);
            for (int j = 0; j < R; j++) sums[i][j][half] = Lanes::add(sums[i][j][half], line, x + j * stride, half);
        }
}

template <class Lanes, int N, int R> DS_AVX2 static DS_INLINE void floating_tile(const Part& p, int64_t n, int64_t r) {
    const int64_t bytes = row_bytes(p.matrix), columns = p.matrix.inputs, stride = Lanes::stride(p);
    const char* w = outputs_from(p, n);
    const float* x = Lanes::rows(p) + (p.row + r) * stride;
    __m256 sums[N][R][2];
    for (auto& output : sums)
        for (auto& row : output) row[0] = row[1] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + Lanes::STEP <= columns; k += Lanes::STEP, w += Lanes::STEP * Lanes::BYTES, x += Lanes::STEP) {
        __builtin_prefetch(w + FAR, 0, 2);
        floating_step<Lanes, N, R>(sums, w, bytes, x, stride);
    }
    if (k < columns) {  // a last step, filled up with zeros
        alignas(32) char rest[N][64] = {};
        alignas(32) float values[R][32] = {};
        const int64_t left = std::min(Lanes::stride(p) - k, Lanes::STEP);
        for (int i = 0; i < N; i++) std::memcpy(rest[i], w + i * bytes, static_cast<size_t>((columns - k) * Lanes::BYTES));
        for (int j = 0; j < R; j++) std::copy_n(x + j * stride, left, values[j]);
        floating_step<Lanes, N, R>(sums, rest[0], 64, values[0], 32);
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < R; j++) p.sums[r + j][n + i] = add_lanes(sums[i][j][0], sums[i][j][1]);
}

template <class Lanes, int N> DS_AVX2 static DS_INLINE void floating_rows(const Part& p, int64_t n) {
    int64_t r = 0;
    for (; r + 3 <= p.rows; r += 3) floating_tile<Lanes, N, 3>(p, n, r);
    if (r + 2 == p.rows) floating_tile<Lanes, N, 2>(p, n, r);
    else if (r < p.rows) floating_tile<Lanes, N, 1>(p, n, r);
}

template <class Lanes> DS_AVX2 static void floating(const Part& p) {
    int64_t n = 0;
    for (; n + 2 <= p.outputs; n += 2) floating_rows<Lanes, 2>(p, n);
    if (n < p.outputs) floating_rows<Lanes, 1>(p, n);
}

// -- integers: sums of products are exact -----------------------------------------------------------------------------

// Widen 16 integers to 16 bits, in column order.
template <Form form> DS_AVX2 static DS_INLINE __m256i sixteen(const uint8_t* row, int64_t k) {
    if constexpr (form == SIGNED8)
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k)));
    if constexpr (form == UNSIGNED8)
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k)));
    const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + k / 2)));
    const __m256i odd = _mm256_slli_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(0xf0)), 12);
    return _mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi32(15)), odd);
}

template <Form form, int N, int R> DS_AVX2 static DS_INLINE void integer_tile(const Part& p, int64_t n, int64_t r) {
    const Matrix& m = p.matrix;
    const int64_t bytes = row_bytes(m), groups = m.inputs / m.group, span = std::min(FLUSH, m.group);
    const auto* w = reinterpret_cast<const uint8_t*>(outputs_from(p, n));
    const auto* x = reinterpret_cast<const int16_t*>(p.x.values.data()) + (p.row + r) * p.x.padded;
    const float* scale = m.scale + (p.output + n) * groups;
    __m256 sums[N][R][2];
    for (auto& output : sums)
        for (auto& row : output) row[0] = row[1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < m.inputs;) {
        __m256i whole[N][R][2];
        for (auto& output : whole)
            for (auto& row : output) row[0] = row[1] = _mm256_setzero_si256();
        const int64_t group = k / m.group, end = std::min(k + span, (group + 1) * m.group);
        for (; k < end; k += LANES) {
            __builtin_prefetch(w + k * bytes / m.inputs + FAR, 0, 2);
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < N; i++) {
                    const __m256i line = sixteen<form>(w + i * bytes, k + 16 * half);
                    for (int j = 0; j < R; j++) {
                        const auto* at = reinterpret_cast<const __m256i*>(x + j * p.x.padded + k + 16 * half);
                        const __m256i products = _mm256_madd_epi16(line, _mm256_loadu_si256(at));
                        whole[i][j][half] = _mm256_add_epi32(whole[i][j][half], products);
                    }
                }
        }
        for (int i = 0; i < N; i++) {
            const __m256 factor = _mm256_set1_ps(scale[i * groups + group]);
            for (int j = 0; j < R; j++)
                for (int half = 0; half < 2; half++)
                    sums[i][j][half] = _mm256_add_ps(
                        sums[i][j][half], _mm256_mul_ps(_mm256_cvtepi32_ps(whole[i][j][half]), factor));
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < R; j++)
            p.sums[r + j][n + i] = finish(p, p.output + n + i, p.row + r + j, add_lanes(sums[i][j][0], sums[i][j][1]));
}

template <Form form, int N> DS_AVX2 static DS_INLINE void integer_rows(const Part& p, int64_t n) {
    int64_t r = 0;
    for (; r + 2 <= p.rows; r += 2) integer_tile<form, N, 2>(p, n, r);
    if (r < p.rows) integer_tile<form, N, 1>(p, n, r);
}

template <Form form> DS_AVX2 static void integers_of_rows(const Part& p) {
    int64_t n = 0;
    for (; n + 2 <= p.outputs; n += 2) integer_rows<form, 2>(p, n);
    if (n < p.outputs) integer_rows<form, 1>(p, n);
}

// -- selection --------------------------------------------------------------------------------------------------------

Kernel avx2_vectors(Form form) {
    constexpr int64_t ROWS = 24;
    switch (form) {
    case WHOLE: return {floating<WholeLanes>, ROWS};
    case SIGNED8: return {integers_of_rows<SIGNED8>, ROWS};
    case UNSIGNED8: return {integers_of_rows<UNSIGNED8>, ROWS};
    case UNSIGNED4: return {integers_of_rows<UNSIGNED4>, ROWS};
    default: return {floating<HalfLanes>, ROWS};  // LOSSLESS panels are unpacked before
    }
}

}  // namespace ds
#endif
