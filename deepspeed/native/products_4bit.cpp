// AVX-512 product of 4-bit matrices. A lane is an output, so that one instruction scales a group's sums of sixteen
// outputs. Rows are 15-bit integers in two signed bytes, high · 128 + low; sums within 32 columns are exact.
#include "vectors.h"

#if defined(__x86_64__)
namespace ds {

constexpr int64_t OUTPUTS = 16;   // lanes
constexpr int64_t SPAN = 512;     // columns that are unpacked at once; their integers fit into the first-level cache
constexpr int64_t PARTS = SPAN / LANES;
constexpr int64_t UNPACKED = 128;  // columns in 64 bytes of each output

// Columns of sixteen outputs. A vector of `integers` holds four columns of each output, even ones or odd ones of eight.
struct Unpacked {
    alignas(64) uint8_t integers[SPAN / 4][64];
    alignas(64) float scale[PARTS][OUTPUTS], offset[PARTS][OUTPUTS];
};

// Prefetch of the next unit's integers, scales and offsets.
struct AllAhead {
    Ahead integers, scale, offset;
    static AllAhead of(const Part& p) {
        const int64_t tiles = p.rows / 8 + (p.rows % 8 >= 4) + (p.rows % 4 > 0);
        const int64_t steps = (p.outputs + OUTPUTS - 1) / OUTPUTS * tiles * (p.matrix.inputs / LANES);
        const int64_t groups = p.matrix.inputs / p.matrix.group, end = (p.output + p.outputs) * groups;
        const auto of = [&](const float* array) {
            return array ? Ahead(reinterpret_cast<const char*>(array + end), 4 * p.outputs * groups, steps)
                         : Ahead(nullptr, 0, steps);
        };
        return {Ahead(p.next, p.next_bytes, steps), of(p.matrix.scale), of(p.matrix.offset)};
    }
    DS_INLINE void fetch() { integers.fetch(), scale.fetch(), offset.fetch(); }
};

// The scales, or offsets, of sixteen outputs for each 32 columns from column k. Outputs past the end repeat the last.
DS_AVX512 static void unpack_scales(const Part& p, const float* from, int64_t n, int64_t k, float (*to)[OUTPUTS]) {
    const Matrix& m = p.matrix;
    const int64_t groups = m.inputs / m.group, first = k / m.group, parts = m.group / LANES;
    const int64_t there = std::min(groups - first, (k % m.group + SPAN + m.group - 1) / m.group);
    const auto mask = static_cast<__mmask16>((1u << there) - 1);
    __m512i of_part = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    if (parts > 1) {
        alignas(64) int32_t group[PARTS];
        for (int64_t i = 0; i < PARTS; i++) group[i] = static_cast<int32_t>((k / LANES + i) / parts - first);
        of_part = _mm512_load_si512(group);
    }
    __m512i rows[OUTPUTS];
    for (int64_t i = 0; i < OUTPUTS; i++) {
        const float* row = from + (p.output + std::min(n + i, p.outputs - 1)) * groups + first;
        rows[i] = _mm512_permutexvar_epi32(of_part, _mm512_maskz_loadu_epi32(mask, row));
    }
    transpose16(rows);
    for (int64_t i = 0; i < PARTS; i++) _mm512_store_si512(to[i], rows[i]);
}

DS_AVX512 static void unpack_columns(const Part& p, int64_t n, int64_t k, Unpacked& out) {
    const Matrix& m = p.matrix;
    const int64_t end = std::min(k + SPAN, m.inputs);
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t at = k; at < end; at += UNPACKED) {
        const int64_t fours = std::min(UNPACKED, end - at) / 8;  // each of four bytes, eight columns
        const auto mask = static_cast<__mmask16>((1u << fours) - 1);
        __m512i rows[OUTPUTS];
        for (int64_t i = 0; i < OUTPUTS; i++)
            rows[i] = _mm512_maskz_loadu_epi32(mask, outputs_from(p, std::min(n + i, p.outputs - 1)) + at / 2);
        transpose16(rows);
        auto* to = out.integers[(at - k) / 4];
        for (int64_t i = 0; i < 16; i++, to += 128) {
            _mm512_store_si512(to, _mm512_and_si512(rows[i], low));
            _mm512_store_si512(to + 64, _mm512_and_si512(_mm512_srli_epi16(rows[i], 4), low));
        }
    }
    unpack_scales(p, m.scale, n, k, out.scale);
    if (m.offset) unpack_scales(p, m.offset, n, k, out.offset);
}

// Integer sums of sixteen outputs within 32 columns for one half of the rows' bytes.
template <bool VNNI> struct Sums {
    __m512i sum;  // without VNNI of neighbours in 16 bits: |15 · 128 · 2 · 8| < 2¹⁵
    DS_AVX512 DS_INLINE void add(__m512i weights, const int8_t* x) {
        if constexpr (VNNI) {
            asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(x)));
        } else {
            int32_t four;
            std::memcpy(&four, x, 4);
            sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(weights, _mm512_set1_epi32(four)));
        }
    }
    DS_AVX512 DS_INLINE __m512i whole() const {
        return VNNI ? sum : _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
    }
};

// Add columns [k, k + 32 · parts) of sixteen outputs and R rows to `p.sums`.
template <bool VNNI, int R>
DS_AVX512 static DS_INLINE void tile(const Part& p, AllAhead& next, const Unpacked& w, int64_t n, int64_t r, int64_t k,
                                     int64_t parts) {
    const auto* x = reinterpret_cast<const int8_t*>(p.x.values.data()) + 2 * ((p.row + r) * p.x.padded + k);
    const float* of_x = p.x.sums.data() + ((p.row + r) * p.x.padded + k) / LANES;
    __m512 total[R];
    for (int j = 0; j < R; j++) total[j] = k ? _mm512_load_ps(&p.sums[r + j][n]) : _mm512_setzero_ps();
    for (int64_t part = 0; part < parts; part++, x += 2 * LANES) {
        next.fetch();
        Sums<VNNI> high[R], low[R];
        for (int j = 0; j < R; j++) high[j].sum = low[j].sum = _mm512_setzero_si512();
        for (int i = 0; i < 8; i++) {
            const __m512i weights = _mm512_load_si512(w.integers[part * 8 + i]);
            for (int j = 0; j < R; j++) {
                high[j].add(weights, x + 2 * j * p.x.padded + 8 * i);
                low[j].add(weights, x + 2 * j * p.x.padded + 8 * i + 4);
            }
        }
        const __m512 scale = _mm512_load_ps(w.scale[part]);
        for (int j = 0; j < R; j++) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[j].whole(), 7), low[j].whole());
            total[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total[j]);
        }
        if (p.matrix.offset) {
            const __m512 offset = _mm512_load_ps(w.offset[part]);
            for (int j = 0; j < R; j++)
                total[j] = _mm512_fmadd_ps(_mm512_set1_ps(of_x[j * (p.x.padded / LANES) + part]), offset, total[j]);
        }
    }
    const bool last = k + parts * LANES == p.matrix.inputs;
    for (int j = 0; j < R; j++) {
        if (last) total[j] = _mm512_mul_ps(total[j], _mm512_set1_ps(p.x.steps[static_cast<size_t>(p.row + r + j)]));
        _mm512_store_ps(&p.sums[r + j][n], total[j]);
    }
}

template <bool VNNI> DS_AVX512 static void unsigned4(const Part& p) {
    Unpacked w;
    const int64_t inputs = p.matrix.inputs;
    AllAhead next = AllAhead::of(p);
    for (int64_t n = 0; n < p.outputs; n += OUTPUTS)
        for (int64_t k = 0; k < inputs; k += SPAN) {
            const int64_t parts = std::min(SPAN, inputs - k) / LANES;
            unpack_columns(p, n, k, w);
            int64_t r = 0;
            for (; r + 8 <= p.rows; r += 8) tile<VNNI, 8>(p, next, w, n, r, k, parts);
            if (p.rows - r >= 4) tile<VNNI, 4>(p, next, w, n, r, k, parts), r += 4;
            switch (p.rows - r) {
            case 3: tile<VNNI, 3>(p, next, w, n, r, k, parts); break;
            case 2: tile<VNNI, 2>(p, next, w, n, r, k, parts); break;
            case 1: tile<VNNI, 1>(p, next, w, n, r, k, parts);
            }
        }
}

DS_AVX512 void split_bytes(int16_t* row, int64_t count) {
    // Of eight columns: high bytes of the even ones, their low bytes, high bytes of the odd ones, their low bytes.
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15, 2, 6, 10, 14));
    for (int64_t k = 0; k < count; k += LANES) {
        const __m512i x = _mm512_loadu_si512(row + k), low = _mm512_and_si512(x, _mm512_set1_epi16(127));
        const __m512i high = _mm512_slli_epi16(_mm512_srai_epi16(x, 7), 8);
        _mm512_storeu_si512(row + k, _mm512_shuffle_epi8(_mm512_or_si512(high, low), order));
    }
}

Kernel unsigned4_vectors() {
    return {instruction_set() >= AVX512_VNNI ? unsigned4<true> : unsigned4<false>, 56};
}

}  // namespace ds
#endif
