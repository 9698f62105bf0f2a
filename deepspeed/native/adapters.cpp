// Low-rank changes of matrices, for the rows of each adapter by themselves.
#include "adapters.h"

#include <algorithm>
#include <vector>

#include <omp.h>

namespace ds {

constexpr int64_t UNIT = 16;              // rows of one adapter that a thread takes at a time
constexpr int64_t TOGETHER = 4;           // rows for which a matrix is read once
constexpr int64_t PER_THREAD = 1 << 16;   // multiplications below which a second thread does not pay off

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

DS_INLINE float one(const float* x) { return *x; }
DS_INLINE float one(const uint16_t* x) { return from_bf16(*x); }

#define DS_SIXTEEN(NAME, FROM)                                                                                         \
    Lanes NAME;                                                                                                        \
    if constexpr (sizeof(*(FROM)) == 4) NAME = *reinterpret_cast<const Lanes*>(FROM);                                  \
    else NAME = (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves*>(FROM), Words) << 16)

// inner[row · rank + j] = scale · (row j of `down` times row `row` of x), for RANKS rows of `down` and ROWS of x.
template <class Element, int RANKS, int ROWS>
DS_INLINE void reduce(const Element* down, const float* x, int64_t width, float scale, float* inner, int64_t rank) {
    Lanes sums[RANKS][ROWS];
    for (int j = 0; j < RANKS; j++)
        for (int r = 0; r < ROWS; r++) sums[j][r] = Lanes{};
    int64_t k = 0;
    for (; k + 16 <= width; k += 16)
        for (int j = 0; j < RANKS; j++) {
            DS_SIXTEEN(w, down + j * width + k);
            for (int r = 0; r < ROWS; r++) sums[j][r] += w * *reinterpret_cast<const Lanes*>(x + r * width + k);
        }
    for (int j = 0; j < RANKS; j++)
        for (int r = 0; r < ROWS; r++) {
            float lanes[16];
            std::memcpy(lanes, &sums[j][r], sizeof lanes);
            for (int64_t i = k; i < width; i++) lanes[i - k] += one(down + j * width + i) * x[r * width + i];
            for (int half = 8; half; half /= 2)
                for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
            inner[r * rank + j] = scale * lanes[0];
        }
}

// y[row] += inner[row] times `up`, for ROWS rows.
template <class Element, int ROWS>
DS_INLINE void expand(const Element* up, const LowRank& m, const float* inner, float* y, int64_t outputs,
                      int64_t stride) {
    constexpr int VECTORS = ROWS == 1 ? 4 : 2;
    int64_t o = 0;
    for (; o + 16 * VECTORS <= outputs; o += 16 * VECTORS) {
        Lanes sums[VECTORS][ROWS];
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < ROWS; r++) sums[v][r] = Lanes{};
        for (int64_t j = 0; j < m.rank; j++)
            for (int v = 0; v < VECTORS; v++) {
                DS_SIXTEEN(w, up + j * m.stride + o + 16 * v);
                for (int r = 0; r < ROWS; r++) sums[v][r] += w * inner[r * m.rank + j];
            }
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < ROWS; r++) *reinterpret_cast<Lanes*>(y + r * stride + o + 16 * v) += sums[v][r];
    }
    for (; o < outputs; o++)
        for (int r = 0; r < ROWS; r++) {
            float sum = 0.0f;
            for (int64_t j = 0; j < m.rank; j++) sum += one(up + j * m.stride + o) * inner[r * m.rank + j];
            y[r * stride + o] += sum;
        }
}

template <class Element, int ROWS>
DS_INLINE void change(const LowRank& m, const float* x, int64_t width, float* y, int64_t outputs, int64_t stride,
                      float* inner) {
    constexpr int RANKS = ROWS == 1 ? 8 : 2;
    const auto* down = static_cast<const Element*>(m.down);
    int64_t j = 0;
    for (; j + RANKS <= m.rank; j += RANKS)
        reduce<Element, RANKS, ROWS>(down + j * width, x, width, m.scale, inner + j, m.rank);
    for (; j < m.rank; j++) reduce<Element, 1, ROWS>(down + j * width, x, width, m.scale, inner + j, m.rank);
    expand<Element, ROWS>(static_cast<const Element*>(m.up), m, inner, y, outputs, stride);
}

template <class Element>
DS_INLINE void change_rows(const LowRank& m, const float* x, int64_t width, float* y, int64_t outputs, int64_t stride,
                           int64_t rows, float* inner) {
    int64_t row = 0;
    for (; row + TOGETHER <= rows; row += TOGETHER)
        change<Element, TOGETHER>(m, x + row * width, width, y + row * stride, outputs, stride, inner);
    for (; row < rows; row++)
        change<Element, 1>(m, x + row * width, width, y + row * stride, outputs, stride, inner);
}

using Change = void (*)(const LowRank&, const float*, int64_t, float*, int64_t, int64_t, int64_t, float*);

#define DS_CHANGE(NAME, TARGET)                                                                                        \
    TARGET static void NAME(const LowRank& m, const float* x, int64_t width, float* y, int64_t outputs,                \
                            int64_t stride, int64_t rows, float* inner) {                                              \
        if (m.kind == FP32) change_rows<float>(m, x, width, y, outputs, stride, rows, inner);                          \
        else change_rows<uint16_t>(m, x, width, y, outputs, stride, rows, inner);                                      \
    }
DS_CHANGE(portable_change, )
DS_CHANGE(avx2_change, DS_AVX2)
DS_CHANGE(avx512_change, DS_AVX512)

void adapt(const Pass& pass, int64_t layer, int64_t first, int64_t rows, const float* x, int64_t width,
           const Adapted* matrices, int64_t count) {
    static thread_local std::vector<AdaptedRows> units;
    units.clear();
    int64_t work = 0;
    for (int64_t a = 0; a < pass.adapted; a++) {
        const AdaptedRows& one = pass.adapters[a];
        const int64_t begin = std::max(one.first, first), end = std::min(one.first + one.count, first + rows);
        if (begin >= end) continue;
        for (int64_t i = 0; i < count; i++)
            work += (end - begin) * (one.layers[layer].*matrices[i].matrix).rank * (width + matrices[i].outputs);
        for (int64_t row = begin; row < end; row += UNIT)
            units.push_back({row - first, std::min(UNIT, end - row), one.layers});
    }
    if (!work) return;
    const Change run = Versions<Change>{portable_change, avx2_change, avx512_change}.pick();
    const AdaptedRows* each = units.data();
    const auto length = static_cast<int64_t>(units.size());
    const int useful = static_cast<int>(std::clamp<int64_t>(std::min(work / PER_THREAD, length), 1, pass.threads));
#pragma omp parallel for schedule(static) num_threads(useful) if (useful > 1)
    for (int64_t u = 0; u < length; u++) {
        static thread_local std::vector<float> inner;
        const AdaptedRows& unit = each[u];
        for (int64_t i = 0; i < count; i++) {
            const LowRank& matrix = unit.layers[layer].*matrices[i].matrix;
            if (!matrix.rank) continue;
            inner.resize(static_cast<size_t>(TOGETHER * matrix.rank));
            run(matrix, x + unit.first * width, width, matrices[i].y + unit.first * matrices[i].stride,
                matrices[i].outputs, matrices[i].stride, unit.count, inner.data());
        }
    }
}

}  // namespace ds
