// Attention in AMX tiles: queries, keys, weights and values in bf16, sums in fp32. Tiles add 32 products at a time and
// keys begin at multiples of 32, so a row's bits depend only on positions here too.
#include <vector>

#include "attention.h"

#if defined(__x86_64__)
namespace ds {

// Sixteen keys in the layout of their page: the left operand.
DS_AMX static const char* sixteen_rows(const Work& w, const void* rows, int64_t t, std::vector<char>& copy,
                                       int64_t& apart) {
    const int64_t row_bytes = 2 * w.heads.size, stride = w.heads.cached * row_bytes;
    const auto* pool = static_cast<const char*>(rows) + w.head * row_bytes;
    if (w.pass.page_size % KEYS == 0) {
        apart = stride;
        if (t + 2 * KEYS < w.end) {  // rows of a head are far apart, beyond hardware prefetching
            const char* ahead = pool + slot(w.pass, w.pages, t + 2 * KEYS) * stride;
            for (int64_t i = 0; i < KEYS; i++, ahead += stride)
                for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(ahead + at);
        }
        return pool + slot(w.pass, w.pages, t) * stride;
    }
    apart = row_bytes;
    copy.assign(static_cast<size_t>(KEYS * row_bytes), 0);
    for (int64_t i = 0; i < std::min(KEYS, w.end - t); i++)
        std::memcpy(copy.data() + i * row_bytes, pool + slot(w.pass, w.pages, t + i) * stride,
                    static_cast<size_t>(row_bytes));
    return copy.data();
}

// Store the scores of keys [t, t + 16) with sixteen queries (or a single one), by query.
DS_AMX static void spread(const Work& w, const float* sums, int64_t q, int64_t t) {
    float* to = w.scores + q * w.padded + t - w.start;
    if (w.count == 1) std::memcpy(to, sums, 4 * KEYS);
    else transpose16(sums, 16, to, w.padded);
}

// Tiles 0 to 3 hold 2 · 16 queries times 2 · 16 keys; B and K are the numbers of used blocks.
template <int B, int K>
DS_AMX static DS_INLINE void score_tiles(const Work& w, const uint32_t* queries, const char* const* keys,
                                         const int64_t* apart, int64_t t) {
    const int64_t columns = w.count == 1 ? 1 : 16, block = w.heads.size / 2 * columns;
    alignas(64) float sums[4][256];
    DS_FENCE;
    _tile_zero(0);
    if (K > 1) _tile_zero(1);
    if (B > 1) _tile_zero(2);
    if (B > 1 && K > 1) _tile_zero(3);
    for (int64_t d = 0; d < w.heads.size; d += 32) {
        const uint32_t* pairs = queries + d / 2 * columns;
        _tile_loadd(4, keys[0] + 2 * d, apart[0]);
        if (K > 1) _tile_loadd(5, keys[1] + 2 * d, apart[1]);
        _tile_loadd(6, pairs, 4 * columns);
        if (B > 1) _tile_loadd(7, pairs + block, 4 * columns);
        _tile_dpbf16ps(0, 4, 6);
        if (K > 1) _tile_dpbf16ps(1, 5, 6);
        if (B > 1) _tile_dpbf16ps(2, 4, 7);
        if (B > 1 && K > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], 4 * columns);
    if (K > 1) _tile_stored(1, sums[1], 4 * columns);
    if (B > 1) _tile_stored(2, sums[2], 4 * columns);
    if (B > 1 && K > 1) _tile_stored(3, sums[3], 4 * columns);
    DS_FENCE;
    for (int b = 0; b < B; b++)
        for (int k = 0; k < K; k++) spread(w, sums[2 * b + k], 16 * b, t + KEYS * k);
}

template <int B> DS_AMX static void score_span_tiles(const Work& w) {
    const int64_t columns = w.count == 1 ? 1 : 16, half = w.heads.size / 2;
    alignas(64) uint32_t queries[QUERIES * LARGEST / 2], rows[16 * LARGEST / 2];
    for (int b = 0; b < B; b++) {
        std::fill(rows, rows + 16 * half, 0);
        for (int64_t q = 16 * b; q < std::min<int64_t>(w.count, 16 * b + 16); q++)
            for (int64_t d = 0; d < w.heads.size; d += 16)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + (q - 16 * b) * half + d / 2),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(w.query[q] + d)));
        if (columns == 1) std::copy(rows, rows + half, queries);
        else
            for (int64_t p = 0; p < half; p += 16) transpose16(rows + p, half, queries + (b * half + p) * 16, 16);
    }
    configure_tiles(16, static_cast<int>(columns));
    static thread_local std::vector<char> copies[2];
    const char* keys[2];
    int64_t apart[2];
    for (int64_t t = w.start; t < w.end; t += 2 * KEYS) {
        keys[0] = sixteen_rows(w, w.heads.keys, t, copies[0], apart[0]);
        if (t + KEYS < w.end) {
            keys[1] = sixteen_rows(w, w.heads.keys, t + KEYS, copies[1], apart[1]);
            score_tiles<B, 2>(w, queries, keys, apart, t);
        } else {
            score_tiles<B, 1>(w, queries, keys, apart, t);
        }
    }
}

// For B · 16 queries and D · 16 head elements from `d` on: bf16 weights [16 · B, whole] times values, in pairs of keys.
template <int B, int D>
DS_AMX static DS_INLINE void mix_tiles(const Work& w, const uint16_t* weights, int64_t whole, int64_t d,
                                       float (*sums)[256]) {
    static_assert(B * D <= 4 && D % 2 == 0);
    alignas(64) __m512i pairs[D][16];
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    Rows values(w, w.heads.values);
    values.begin();
    DS_FENCE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = w.start; t < w.end; t += 2 * KEYS) {
        for (int64_t i = 0; i < 16; i++) {
            const char* one = t + 2 * i < w.end ? values.next() : nullptr;
            const char* other = t + 2 * i + 1 < w.end ? values.next() : nullptr;
            for (int half = 0; half < D / 2; half++) {
                const int64_t at = 2 * (d + 32 * half);
                const __m512i even = one ? _mm512_loadu_si512(one + at) : _mm512_setzero_si512();
                const __m512i odd = other ? _mm512_loadu_si512(other + at) : _mm512_setzero_si512();
                pairs[2 * half][i] = _mm512_permutex2var_epi16(even, low, odd);
                pairs[2 * half + 1][i] = _mm512_permutex2var_epi16(even, high, odd);
            }
        }
        DS_FENCE;
        const uint16_t* from = weights + t - w.start;
        _tile_loadd(4, from, 2 * whole);
        if (B > 1) _tile_loadd(5, from + 16 * whole, 2 * whole);
        _tile_loadd(6, pairs[0], 64);
        _tile_loadd(7, pairs[1], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (B > 1) _tile_dpbf16ps(2, 5, 6);
        if (B > 1) _tile_dpbf16ps(3, 5, 7);
        if (D > 2) {
            _tile_loadd(6, pairs[D - 2], 64);
            _tile_loadd(7, pairs[D - 1], 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
        DS_FENCE;
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    DS_FENCE;
}

// Tile k of `sums` has queries from 16 · (k / across) and elements from d + 16 · (k % across).
DS_AMX static void write_mixed(const Work& w, const float (*sums)[256], int64_t d, int across, const float* total) {
    for (int k = 0; k < 4; k++)
        for (int64_t i = 0; i < 16 && 16 * (k / across) + i < w.count; i++) {
            const int64_t row = 16 * (k / across) + i;
            _mm512_storeu_ps(w.out[row] + d + 16 * (k % across),
                             _mm512_div_ps(_mm512_load_ps(sums[k] + 16 * i), _mm512_set1_ps(total[row])));
        }
}

// eˣ for x ≤ 0, equal to `exponential` in decoder.h; 0 below -87, NaN stays NaN.
DS_AMX static DS_INLINE __m512 exponentials(__m512 x) {
    const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // subnormal results are slow, even if unused
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f),
                                      _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x));
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(1.0f / 720.0f), _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(seen, p, n);
}

// Softmax weights of a row in bf16, not yet divided by their fp32 sum, which is returned.
DS_AMX static float weigh_halves(const Work& w, int64_t q, uint16_t* weights) {
    float* scores = w.scores + q * w.padded;
    const int64_t first = w.heads.window ? std::max<int64_t>(0, w.position[q] + 1 - w.heads.window - w.start) : 0;
    const int64_t begin = first / KEYS * KEYS, end = w.position[q] + 1 - w.start, whole = (end + KEYS - 1) / KEYS * KEYS;
    std::fill(scores + begin, scores + first, -INFINITY);
    std::fill(scores + end, scores + whole, -INFINITY);
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t t = begin; t < whole; t += KEYS) largest = _mm512_max_ps(_mm512_loadu_ps(scores + t), largest);
    const __m512 scale = _mm512_set1_ps(w.heads.scale);
    const __m512 offset = _mm512_set1_ps(_mm512_reduce_max_ps(largest) * w.heads.scale);
    for (int64_t t = begin; t < whole; t += KEYS) {
        const __m512 weight = exponentials(_mm512_fmsub_ps(_mm512_loadu_ps(scores + t), scale, offset));
        sum = _mm512_add_ps(sum, weight);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + t), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    return _mm512_reduce_add_ps(sum);
}

DS_AMX void attend_in_tiles(const Work& w) {
    if (w.count > 16) score_span_tiles<2>(w);
    else score_span_tiles<1>(w);
    const int64_t whole = (w.end - w.start + 31) / 32 * 32;
    static thread_local std::vector<uint16_t> weights;
    weights.assign(static_cast<size_t>(in_tiles(w.count) * whole), 0);
    float total[QUERIES];
    for (int64_t q = 0; q < w.count; q++) total[q] = weigh_halves(w, q, weights.data() + q * whole);
    configure_tiles(w.count == 1 ? 1 : 16, 16);
    alignas(64) float sums[4][256];
    int64_t d = 0;
    if (w.count <= 16)
        for (; d + 64 <= w.heads.size; d += 64) {
            mix_tiles<1, 4>(w, weights.data(), whole, d, sums);
            write_mixed(w, sums, d, 4, total);
        }
    for (; d < w.heads.size; d += 32) {
        if (w.count > 16) mix_tiles<2, 2>(w, weights.data(), whole, d, sums);
        else mix_tiles<1, 2>(w, weights.data(), whole, d, sums);
        write_mixed(w, sums, d, 2, total);
    }
    _tile_release();
}

}  // namespace ds
#endif
