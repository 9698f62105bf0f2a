// AVX-512 product of floating-point matrices.
#include <algorithm>

#include "lossless.h"
#include "tiles.h"
#include "vectors.h"

#if defined(__x86_64__)
namespace ds {

constexpr int64_t SPAN = 768;  // columns of eight fp32 outputs that fit into the first-level cache

// -- floating-point numbers -------------------------------------------------------------------------------------------

struct Whole {
    static constexpr int64_t STEP = 16;
    using X = float;
    static DS_INLINE const X* rows(const Part& p) { return p.x.plain; }
    static DS_INLINE int64_t stride(const Part& p) { return p.matrix.inputs; }
    DS_AVX512 static DS_INLINE __m512i load(const char* w, int64_t k, int64_t left) {
        const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
        return _mm512_maskz_loadu_epi32(mask, reinterpret_cast<const float*>(w) + k);
    }
    DS_AVX512 static DS_INLINE __m512 step(__m512 sum, __m512i w, const float* x, int64_t left) {
        const __m512i other = load(reinterpret_cast<const char*>(x), 0, left);
        return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(other), sum);
    }
};

struct Pairs {
    static constexpr int64_t STEP = 32;
    using X = uint16_t;
    static DS_INLINE const X* rows(const Part& p) { return reinterpret_cast<const X*>(p.x.values.data()); }
    static DS_INLINE int64_t stride(const Part& p) { return p.x.padded; }
    DS_AVX512 static DS_INLINE __m512i load(const char* w, int64_t k, int64_t left) {
        const __mmask32 mask = left >= 32 ? 0xffffffff : (1u << left) - 1;
        return _mm512_maskz_loadu_epi16(mask, reinterpret_cast<const uint16_t*>(w) + k);
    }
    DS_BF16 static DS_INLINE __m512 step(__m512 sum, __m512i w, const uint16_t* x, int64_t) {
        return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_loadu_si512(x));
    }
};

// Multiply N outputs with R rows. For few rows the matrix is read one output after the other, as one stream (four
// streams had half the bandwidth). For more rows the next outputs are prefetched meanwhile.
#define DS_FLOATING(NAME, TARGET, DOT)                                                                                 \
    template <int N, int R>                                                                                            \
    TARGET static DS_INLINE void NAME##_tile(const Part& p, Ahead& next, int64_t n, int64_t r) {                       \
        const int64_t bytes = row_bytes(p.matrix), columns = p.matrix.inputs, stride = DOT::stride(p);                 \
        const char* w = outputs_from(p, n);                                                                            \
        const auto* x = DOT::rows(p) + (p.row + r) * stride;                                                           \
        __m512 sums[N][R];                                                                                             \
        for (auto& row : sums)                                                                                         \
            for (auto& sum : row) sum = _mm512_setzero_ps();                                                           \
        int64_t k = 0;                                                                                                 \
        for (; k + DOT::STEP <= columns; k += DOT::STEP) {                                                             \
            if (N == 1) __builtin_prefetch(w + k * sizeof(DOT::X) + FAR, 0, 2);                                        \
            else next.fetch();                                                                                         \
            for (int i = 0; i < N; i++) {                                                                              \
                const __m512i line = _mm512_loadu_si512(w + i * bytes + k * sizeof(DOT::X));                           \
                for (int j = 0; j < R; j++)                                                                            \
                    sums[i][j] = DOT::step(sums[i][j], line, x + j * stride + k, DOT::STEP);                           \
            }                                                                                                          \
        }                                                                                                              \
        for (; k < columns; k += DOT::STEP)                                                                            \
            for (int i = 0; i < N; i++) {                                                                              \
                const __m512i line = DOT::load(w + i * bytes, k, columns - k);                                         \
                for (int j = 0; j < R; j++)                                                                            \
                    sums[i][j] = DOT::step(sums[i][j], line, x + j * stride + k, columns - k);                         \
            }                                                                                                          \
        put(p, n, r, sums);                                                                                            \
    }                                                                                                                  \
    template <int N> TARGET static DS_INLINE void NAME##_outputs(const Part& p, Ahead& next, int64_t n) {              \
        int64_t r = 0;                                                                                                 \
        for (; r + 4 <= p.rows; r += 4) NAME##_tile<N, 4>(p, next, n, r);                                              \
        switch (p.rows - r) {                                                                                          \
        case 3: NAME##_tile<N, 3>(p, next, n, r); break;                                                               \
        case 2: NAME##_tile<N, 2>(p, next, n, r); break;                                                               \
        case 1: NAME##_tile<N, 1>(p, next, n, r);                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void NAME(const Part& p) {                                                                           \
        const int64_t tiles = (p.outputs + 3) / 4 * ((p.rows + 3) / 4);                                                \
        Ahead next(p.next, p.next_bytes, tiles * (p.matrix.inputs / DOT::STEP));                                       \
        int64_t n = 0;                                                                                                 \
        if (p.x.rows > FEW)                                                                                            \
            for (; n + 4 <= p.outputs; n += 4) NAME##_outputs<4>(p, next, n);                                          \
        for (; n < p.outputs; n++) NAME##_outputs<1>(p, next, n);                                                      \
    }

DS_FLOATING(whole, DS_AVX512, Whole)
DS_FLOATING(pairs, DS_BF16, Pairs)

// -- bf16 in products of fp32 -----------------------------------------------------------------------------------------

// 32 columns, split into even and odd ones.
struct Two {
    __m512 even, odd;
    DS_AVX512 static DS_INLINE Two of(__m512i line) {
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(line, 16)), _mm512_castsi512_ps(_mm512_and_si512(line, high))};
    }
    DS_AVX512 static DS_INLINE Two of(const float* at) { return {_mm512_loadu_ps(at), _mm512_loadu_ps(at + 16)}; }
    DS_AVX512 DS_INLINE __m512 add(__m512 sum, const Two& x) const {
        return _mm512_fmadd_ps(odd, x.odd, _mm512_fmadd_ps(even, x.even, sum));
    }
};

DS_AVX512 static DS_INLINE __m512i rounded(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
    const __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(up, none, _mm512_set1_epi32(0x7fc00000));
    return _mm512_and_si512(kept, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
}

DS_AVX512 void round_to_wide(const float* x, float* out, int64_t count) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t k = 0; k < count; k += 32) {
        const __m512i a = rounded(_mm512_castsi512_ps(Whole::load(reinterpret_cast<const char*>(x), k, count - k)));
        const int64_t left = std::max<int64_t>(0, count - k - 16);
        const __m512i b = rounded(_mm512_castsi512_ps(Whole::load(reinterpret_cast<const char*>(x), k + 16, left)));
        _mm512_storeu_si512(out + k, _mm512_permutex2var_epi32(a, even, b));
        _mm512_storeu_si512(out + k + 16, _mm512_permutex2var_epi32(a, odd, b));
    }
}

static DS_INLINE const float* wide_row(const Part& p, int64_t r) {
    return reinterpret_cast<const float*>(p.x.values.data()) + (p.row + r) * p.x.padded;
}

// Multiply one output, read as a memory stream, with R rows.
template <int R> DS_AVX512 static DS_INLINE void wide_few(const Part& p, int64_t n) {
    const int64_t columns = p.matrix.inputs, padded = p.x.padded;
    const char* w = outputs_from(p, n);
    const float* x = wide_row(p, 0);
    __m512 sums[1][R];
    for (auto& sum : sums[0]) sum = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 32 <= columns; k += 32) {
        __builtin_prefetch(w + 2 * k + FAR, 0, 2);
        const Two line = Two::of(_mm512_loadu_si512(w + 2 * k));
        for (int j = 0; j < R; j++) sums[0][j] = line.add(sums[0][j], Two::of(x + j * padded + k));
    }
    if (k < columns) {
        const Two line = Two::of(Pairs::load(w, k, columns - k));
        for (int j = 0; j < R; j++) sums[0][j] = line.add(sums[0][j], Two::of(x + j * padded + k));
    }
    put(p, n, 0, sums);
}

// `widen_outputs` for a LOSSLESS matrix.
DS_AVX512 static void widen_lossless(const Part& p, int64_t n, int64_t k, int64_t end, float* out) {
    if (n + GROUP >= p.outputs) std::fill_n(out, 8 * (end - k), 0.0f);
    const Decoder decode = Decoder::of(p.matrix);
    for (; n < p.outputs; n += GROUP, out += 32 * GROUP) {
        const auto* w = reinterpret_cast<const uint8_t*>(outputs_from(p, n)) + k / BLOCK * STRIDE;
        for (int64_t at = k; at < end; at += BLOCK, w += STRIDE)
            for (int64_t i = 0; i < GROUP; i++) {
                __m512i lines[2];
                decode(w + i * PIECE, lines[0], lines[1]);
                for (int64_t half = 0; half < 2; half++) {
                    const Two two = Two::of(lines[half]);
                    float* to = out + ((at - k) / 32 + half) * 256 + 32 * i;
                    _mm512_store_ps(to, two.even);
                    _mm512_store_ps(to + 16, two.odd);
                }
            }
        Escapes(p.matrix, p.output + n).take(end, [&](int64_t i, int64_t column, uint16_t bits) {
            if (column >= k) out[(column - k) / 32 * 256 + 32 * i + column % 2 * 16 + column % 32 / 2] = from_bf16(bits);
        });
        if (n % 8) return;
    }
}

// Convert columns [k, end) of eight outputs to fp32, [step, output, 32]; missing outputs are zero.
DS_AVX512 static void widen_outputs(const Part& p, int64_t n, int64_t k, int64_t end, float* out) {
    if (p.matrix.form == LOSSLESS) return widen_lossless(p, n, k, end, out);
    const int64_t bytes = row_bytes(p.matrix), columns = p.matrix.inputs, there = std::min<int64_t>(8, p.outputs - n);
    const char* w = outputs_from(p, n);
    for (; k < end; k += 32, out += 256)
        for (int64_t i = 0; i < 8; i++) {
            __m512i line = _mm512_setzero_si512();
            if (i < there) line = k + 32 <= columns ? _mm512_loadu_si512(w + i * bytes + 2 * k)
                                                    : Pairs::load(w + i * bytes, k, columns - k);
            const Two two = Two::of(line);
            _mm512_store_ps(out + 32 * i, two.even);
            _mm512_store_ps(out + 32 * i + 16, two.odd);
        }
}

// Multiply eight outputs with R rows over some of the columns; `held` accumulates the lanes over all columns.
template <int R>
DS_AVX512 static DS_INLINE void wide_tile(const Part& p, Ahead& next, const float* w, int64_t n, int64_t r, int64_t k,
                                          int64_t end, float* held) {
    const float* x = wide_row(p, r);
    __m512 sums[8][R];
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < R; j++)
            sums[i][j] = k ? _mm512_load_ps(held + 16 * (R * i + j)) : _mm512_setzero_ps();
    for (; k < end; k += 32, w += 256) {
        next.fetch();
        Two rows[R];
        for (int j = 0; j < R; j++) rows[j] = Two::of(x + j * p.x.padded + k);
        for (int i = 0; i < 8; i++) {
            Two line = Two::of(w + 32 * i);
            asm("" : "+v"(line.even), "+v"(line.odd));  // loaded once, where GCC would read it for each row
            for (int j = 0; j < R; j++) sums[i][j] = line.add(sums[i][j], rows[j]);
        }
    }
    if (end == p.x.padded) return put(p, n, r, sums);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < R; j++) _mm512_store_ps(held + 16 * (R * i + j), sums[i][j]);
}

// Widens the matrix on the fly, for processors on which bf16 pair products are slower than fp32 products.
DS_AVX512 static void wide(const Part& p) {
    if (p.x.rows <= FEW) {
        for (int64_t n = 0; n < p.outputs; n++) switch (p.rows) {
            case 1: wide_few<1>(p, n); break;
            case 2: wide_few<2>(p, n); break;
            case 3: wide_few<3>(p, n); break;
            default: wide_few<4>(p, n);
            }
        return;
    }
    alignas(64) float weights[8 * SPAN], held[MOST_ROWS * 8 * 16];
    const int64_t padded = p.x.padded, spans = (padded + SPAN - 1) / SPAN;
    const int64_t span = ((padded + spans - 1) / spans + BLOCK - 1) / BLOCK * BLOCK;
    Ahead next(p.next, p.next_bytes, (p.outputs + 7) / 8 * ((p.rows + 2) / 3) * (padded / 32));
    for (int64_t n = 0; n < p.outputs; n += 8)
        for (int64_t k = 0; k < padded; k += span) {
            const int64_t end = std::min(k + span, padded);
            widen_outputs(p, n, k, end, weights);
            int64_t r = 0;
            for (; r + 3 <= p.rows; r += 3) wide_tile<3>(p, next, weights, n, r, k, end, held + 128 * r);
            if (r + 2 == p.rows) wide_tile<2>(p, next, weights, n, r, k, end, held + 128 * r);
            else if (r < p.rows) wide_tile<1>(p, next, weights, n, r, k, end, held + 128 * r);
        }
}

// -- bf16 in 12 bits, for few rows ------------------------------------------------------------------------------------

struct Wide {
    using X = float;
    static DS_INLINE const X* rows(const Part& p) { return wide_row(p, 0); }
    DS_AVX512 static DS_INLINE __m512 step(__m512 sum, __m512i w, const float* x, int64_t) {
        return Two::of(w).add(sum, Two::of(x));
    }
};

// Multiply four outputs with R rows: one memory stream, and enough independent sums to hide latency.
#define DS_LOSSLESS(NAME, TARGET, DOT)                                                                                 \
    template <int R> TARGET static void NAME##_few(const Part& p) {                                                    \
        const int64_t columns = p.matrix.inputs, padded = p.x.padded;                                                  \
        const auto* x = DOT::rows(p);                                                                                  \
        const Decoder decode = Decoder::of(p.matrix);                                                                  \
        for (int64_t n = 0; n < p.outputs; n += GROUP) {                                                               \
            const auto* w = reinterpret_cast<const uint8_t*>(outputs_from(p, n));                                      \
            Escapes escapes(p.matrix, p.output + n);                                                                   \
            __m512 sums[GROUP][R];                                                                                     \
            for (auto& row : sums)                                                                                     \
                for (auto& sum : row) sum = _mm512_setzero_ps();                                                       \
            for (int64_t k = 0; k < columns;) {                                                                        \
                for (const int64_t stop = escapes.block(columns); k < stop; k += BLOCK, w += STRIDE) {                 \
                    for (int64_t i = 0; i < STRIDE; i += 64) __builtin_prefetch(w + LOSSLESS_FAR + i, 0, 2);           \
                    for (int i = 0; i < GROUP; i++) {                                                                  \
                        __m512i low, high;                                                                             \
                        decode(w + i * PIECE, low, high);                                                              \
                        for (int j = 0; j < R; j++) sums[i][j] = DOT::step(sums[i][j], low, x + j * padded + k, 32);   \
                        for (int j = 0; j < R; j++)                                                                    \
                            sums[i][j] = DOT::step(sums[i][j], high, x + j * padded + k + 32, 32);                     \
                    }                                                                                                  \
                }                                                                                                      \
                if (k == columns) break;                                                                               \
                alignas(64) uint16_t block[GROUP][BLOCK];                                                              \
                decode_block(decode, w, k, escapes, block);                                                            \
                for (int i = 0; i < GROUP; i++)                                                                        \
                    for (int64_t at = 0; at < BLOCK; at += 32)                                                         \
                        for (int j = 0; j < R; j++)                                                                    \
                            sums[i][j] = DOT::step(sums[i][j], _mm512_load_si512(block[i] + at),                       \
                                                   x + j * padded + k + at, 32);                                       \
                k += BLOCK, w += STRIDE;                                                                               \
            }                                                                                                          \
            put(p, n, 0, sums);                                                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME(const Part& p) {                                                                                  \
        switch (p.rows) {                                                                                              \
        case 1: return NAME##_few<1>(p);                                                                               \
        case 2: return NAME##_few<2>(p);                                                                               \
        case 3: return NAME##_few<3>(p);                                                                               \
        default: NAME##_few<4>(p);                                                                                     \
        }                                                                                                              \
    }

DS_LOSSLESS(lossless_wide, DS_AVX512, Wide)
DS_LOSSLESS(lossless_pairs, DS_BF16, Pairs)

// -- selection --------------------------------------------------------------------------------------------------------

Kernel vectors(const Matrix& matrix, const Input& x) {
    switch (matrix.form) {
    case WHOLE: return {whole, 32};
    case HALF: return x.wide ? Kernel{wide, MOST_ROWS} : Kernel{pairs, 32};
    case LOSSLESS:
        if (x.rows <= FEW) return {x.wide ? lossless_wide : lossless_pairs, FEW, true};
        return x.wide ? Kernel{wide, MOST_ROWS, true} : Kernel{pairs, 32, false, GROUP};
    case UNSIGNED4: return unsigned4_vectors();
    default: return integer_vectors(matrix.form);
    }
}

}  // namespace ds
#endif
