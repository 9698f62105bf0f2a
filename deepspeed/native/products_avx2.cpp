// AVX2 products of matrices of all forms: the lanes, and the order of their sum, are those of products.cpp.
#include <algorithm>
#include <cstring>

#include "vectors.h"

#if defined(__x86_64__)
namespace ds {

// -- floating-point numbers -------------------------------------------------------------------------------------------

// A step multiplies eight of the sixteen lanes of N outputs and R rows. The other eight are 32 bytes further in both.
struct WholeLanes {
    static constexpr int64_t STEP = 16, BYTES = 4;
    static DS_INLINE const float* rows(const Part& p) { return p.x.plain; }
    static DS_INLINE int64_t stride(const Part& p) { return p.matrix.inputs; }
    template <int N, int R>
    DS_AVX2 static DS_INLINE void step(__m256 (&sums)[N][R], const char* w, int64_t bytes, const float* x,
                                       int64_t stride) {
        __m256 rows[R];
        for (int j = 0; j < R; j++) rows[j] = _mm256_loadu_ps(x + j * stride);
        for (int i = 0; i < N; i++) {
            const __m256 line = _mm256_loadu_ps(reinterpret_cast<const float*>(w + i * bytes));
            for (int j = 0; j < R; j++) sums[i][j] = _mm256_fmadd_ps(line, rows[j], sums[i][j]);
        }
    }
};

// bf16, with rows in the order of `round_to_pairs`; products of two bf16 values are exact.
struct HalfLanes {
    static constexpr int64_t STEP = 32, BYTES = 2;
    static DS_INLINE const float* rows(const Part& p) { return reinterpret_cast<const float*>(p.x.values.data()); }
    static DS_INLINE int64_t stride(const Part& p) { return p.x.padded; }
    template <int N, int R>
    DS_AVX2 static DS_INLINE void step(__m256 (&sums)[N][R], const char* w, int64_t bytes, const float* x,
                                       int64_t stride) {
        const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
        for (int odd = 0; odd < 2; odd++) {
            __m256 rows[R];
            for (int j = 0; j < R; j++) rows[j] = _mm256_loadu_ps(x + 16 * odd + j * stride);
            for (int i = 0; i < N; i++) {
                const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i * bytes));
                const __m256 line =
                    _mm256_castsi256_ps(odd ? _mm256_and_si256(pairs, high) : _mm256_slli_epi32(pairs, 16));
                for (int j = 0; j < R; j++) sums[i][j] = _mm256_fmadd_ps(line, rows[j], sums[i][j]);
            }
        }
    }
};

void round_to_pairs(const float* x, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i / 32 * 32 + i % 2 * 16 + i % 32 / 2] = from_bf16(to_bf16(x[i]));
}

constexpr int64_t ROWS = 24;    // rows of a unit of work
constexpr int64_t SPAN = 512;   // columns of four outputs and three rows that fit into the first-level cache
constexpr int64_t EIGHT = 8;    // lanes of a vector

// Columns of outputs and rows that are multiplied together.
struct Columns {
    const char* w;
    int64_t bytes;  // of an output
    const float* x;
    int64_t stride, steps;
    bool first, last;  // of the matrix
};

// The last columns of some outputs and of all rows, filled up with zeros to a step.
template <class Lanes> struct LastColumns {
    alignas(32) char w[4][64] = {};
    alignas(32) float x[ROWS][32] = {};
    DS_INLINE void read_rows(const Part& p, int64_t k) {
        const int64_t stride = Lanes::stride(p), left = std::min(stride - k, Lanes::STEP);
        for (int64_t j = 0; j < p.rows; j++) std::copy_n(Lanes::rows(p) + (p.row + j) * stride + k, left, x[j]);
    }
    DS_INLINE void read_outputs(const Part& p, int64_t n, int64_t count, int64_t k) {
        const auto bytes = static_cast<size_t>((p.matrix.inputs - k) * Lanes::BYTES);
        for (int64_t i = 0; i < count; i++)
            std::memcpy(w[i], outputs_from(p, n + i) + k * Lanes::BYTES, bytes);
    }
    Columns columns(bool first) const { return {w[0], 64, x[0], 32, 1, first, true}; }
};

// All lanes of N outputs and R rows together: the matrix is read once.
template <class Lanes, int N, int R> DS_AVX2 static DS_INLINE void narrow_tile(const Part& p, int64_t n, int64_t r) {
    __m256 low[N][R], high[N][R];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < R; j++) low[i][j] = high[i][j] = _mm256_setzero_ps();
    const auto add = [&](const Columns& c) DS_AVX2 {
        const char* w = c.w;
        const float* x = c.x + r * c.stride;
        for (int64_t i = 0; i < c.steps; i++, w += Lanes::STEP * Lanes::BYTES, x += Lanes::STEP) {
            __builtin_prefetch(w + FAR, 0, 2);
            Lanes::template step<N, R>(low, w, c.bytes, x, c.stride);
            Lanes::template step<N, R>(high, w + 32, c.bytes, x + EIGHT, c.stride);
        }
    };
    const int64_t stride = Lanes::stride(p), steps = p.matrix.inputs / Lanes::STEP, k = steps * Lanes::STEP;
    add({outputs_from(p, n), row_bytes(p.matrix), Lanes::rows(p) + p.row * stride, stride, steps, true, true});
    if (k < p.matrix.inputs) {
        LastColumns<Lanes> rest;
        rest.read_rows(p, k);
        rest.read_outputs(p, n, N, k);
        add(rest.columns(false));
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < R; j++) p.sums[r + j][n + i] = add_lanes(low[i][j], high[i][j]);
}

template <class Lanes> DS_AVX2 static void narrow_tiles(const Part& p) {
    for (int64_t r = 0; r < p.rows; r += 2) {
        const bool two = r + 1 < p.rows;
        int64_t n = 0;
        for (; n + 2 <= p.outputs; n += 2) two ? narrow_tile<Lanes, 2, 2>(p, n, r) : narrow_tile<Lanes, 2, 1>(p, n, r);
        if (n < p.outputs) two ? narrow_tile<Lanes, 1, 2>(p, n, r) : narrow_tile<Lanes, 1, 1>(p, n, r);
    }
}

// Four outputs and R rows, first eight lanes and then the others: their sums fit into registers, and each vector that
// is read is used several times. `held` has the lanes of the columns before.
template <class Lanes, int R>
DS_AVX2 static DS_INLINE void tile(const Part& p, const Columns& c, Ahead& next, int64_t n, int64_t r, float* held) {
    __m256 sums[4][R];
    for (int half = 0; half < 2; half++) {
        next.fetch();
        float* lanes = held + half * 4 * R * EIGHT;
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < R; j++)
                sums[i][j] = c.first ? _mm256_setzero_ps() : _mm256_load_ps(lanes + EIGHT * (R * i + j));
        const char* w = c.w + 32 * half;
        const float* x = c.x + r * c.stride + EIGHT * half;
        for (int64_t i = 0; i < c.steps; i++, w += Lanes::STEP * Lanes::BYTES, x += Lanes::STEP)
            Lanes::template step<4, R>(sums, w, c.bytes, x, c.stride);
        if (half && c.last) break;
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < R; j++) _mm256_store_ps(lanes + EIGHT * (R * i + j), sums[i][j]);
    }
    if (!c.last) return;
    for (int j = 0; j < R; j++) {
        __m256 eight[4];
        for (int i = 0; i < 4; i++) eight[i] = _mm256_add_ps(_mm256_load_ps(held + EIGHT * (R * i + j)), sums[i][j]);
        _mm_storeu_ps(&p.sums[r + j][n], add_lanes(eight));
    }
}

template <class Lanes> DS_AVX2 static void floating(const Part& p) {
    if (p.rows < 3 || p.outputs < 4) return narrow_tiles<Lanes>(p);
    alignas(32) float held[ROWS * 4 * 2 * EIGHT];
    const int64_t bytes = row_bytes(p.matrix), columns = p.matrix.inputs, stride = Lanes::stride(p);
    const int64_t whole = columns / Lanes::STEP * Lanes::STEP, spans = (columns + SPAN - 1) / SPAN;
    const float* x = Lanes::rows(p) + p.row * stride;
    LastColumns<Lanes> rest;
    if (whole < columns) rest.read_rows(p, whole);
    for (int64_t begin = 0; begin < p.outputs; begin += 4) {
        const int64_t n = std::min(begin, p.outputs - 4);
        const char* w = outputs_from(p, n);
        Ahead next(w + 4 * bytes, 4 * bytes, 2 * ((p.rows + 2) / 3) * spans);  // the next four: faster here than a unit
        for (int64_t k = 0; k < columns;) {
            const int64_t end = k < whole ? std::min(k + SPAN, whole) : columns;
            Columns c{w + k * Lanes::BYTES, bytes, x + k, stride, (end - k) / Lanes::STEP, k == 0, end == columns};
            if (k == whole) {
                rest.read_outputs(p, n, 4, k);
                c = rest.columns(k == 0);
            }
            int64_t r = 0;
            for (; p.rows - r > 4 || p.rows - r == 3; r += 3) tile<Lanes, 3>(p, c, next, n, r, held + 8 * EIGHT * r);
            for (; r < p.rows; r += 2) tile<Lanes, 2>(p, c, next, n, r, held + 8 * EIGHT * r);
            k = end;
        }
    }
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
