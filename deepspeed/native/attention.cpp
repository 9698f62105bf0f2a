// Paged attention in place. Scores, softmax and weighted sum of a row are computed in an order that depends only on the
// keys' positions, so a row's bits depend neither on its chunk nor on other sequences.
#include <algorithm>

#include <omp.h>

#include "attention.h"

namespace ds {

// -- portable ---------------------------------------------------------------------------------------------------------

DS_INLINE void plain(const Work& w) {
    const int64_t size = w.heads.size;
    alignas(64) float row[LARGEST];
    Rows keys(w, w.heads.keys), values(w, w.heads.values);
    for (int64_t t = w.start; t < w.end; t++) {
        load(keys.next(), w.heads.kind, row, size);
        for (int64_t q = 0; q < w.count; q++) {
            float lanes[16] = {}, sum = 0.0f;  // lanes become vectors
            int64_t d = 0;
            for (; d + 16 <= size; d += 16)
                for (int i = 0; i < 16; i++) lanes[i] += w.query[q][d + i] * row[d + i];
            for (int half = 8; half; half /= 2)
                for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
            for (; d < size; d++) sum += w.query[q][d] * row[d];
            w.scores[q * w.padded + t - w.start] = lanes[0] + sum;
        }
    }
    float total[QUERIES];
    for (int64_t q = 0; q < w.count; q++) {
        total[q] = weigh(w, q);
        std::fill(w.out[q], w.out[q] + size, 0.0f);
    }
    for (int64_t t = w.start; t < w.end; t++) {
        load(values.next(), w.heads.kind, row, size);
        for (int64_t q = 0; q < w.count; q++) {
            const float weight = w.scores[q * w.padded + t - w.start];
            for (int64_t d = 0; d < size; d++) w.out[q][d] += weight * row[d];
        }
    }
    for (int64_t q = 0; q < w.count; q++)
        for (int64_t d = 0; d < size; d++) w.out[q][d] /= total[q];
}

static void portable(const Work& w) { plain(w); }

#if defined(__x86_64__)
// -- vectors ----------------------------------------------------------------------------------------------------------

DS_AVX512 static DS_INLINE __m512 sixteen(const char* row, Kind kind, int64_t at) {
    if (kind == FP32) return _mm512_loadu_ps(reinterpret_cast<const float*>(row) + at);
    const auto* halves = reinterpret_cast<const __m256i*>(reinterpret_cast<const uint16_t*>(row) + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(halves)), 16));
}

// Transpose keys [t, t + 16): turned[d][key], zeros past the end.
DS_AVX512 static void turn(const Work& w, Rows& keys, int64_t t, float* turned) {
    alignas(64) float rows[KEYS * 16];
    const char* row[KEYS];
    for (int64_t i = 0; i < KEYS; i++) row[i] = t + i < w.end ? keys.next() : nullptr;
    for (int64_t d = 0; d < w.heads.size; d += 16) {
        for (int64_t i = 0; i < KEYS; i++)
            _mm512_store_ps(rows + 16 * i, row[i] ? sixteen(row[i], w.heads.kind, d) : _mm512_setzero_ps());
        transpose16(rows, 16, turned + d * KEYS, KEYS);
    }
}

// Score R queries with 16 · V keys. Each query has two independent sums, to hide the latency of additions.
template <int R, int V> DS_AVX512 static DS_INLINE void score(const Work& w, int64_t q, const float* turned, int64_t t) {
    __m512 sums[R][V][2];
    for (auto& row : sums)
        for (auto& keys : row) keys[0] = keys[1] = _mm512_setzero_ps();
    for (int64_t d = 0; d < w.heads.size; d += 2)
        for (int c = 0; c < 2; c++) {
            __m512 keys[V];
            for (int v = 0; v < V; v++) keys[v] = _mm512_load_ps(turned + (v * w.heads.size + d + c) * KEYS);
            for (int j = 0; j < R; j++) {
                const __m512 one = _mm512_set1_ps(w.query[q + j][d + c]);
                for (int v = 0; v < V; v++) sums[j][v][c] = _mm512_fmadd_ps(one, keys[v], sums[j][v][c]);
            }
        }
    for (int j = 0; j < R; j++)
        for (int v = 0; v < V; v++)
            _mm512_storeu_ps(w.scores + (q + j) * w.padded + t - w.start + v * KEYS,
                             _mm512_add_ps(sums[j][v][0], sums[j][v][1]));
}

template <int V> DS_AVX512 static DS_INLINE void score_all(const Work& w, const float* turned, int64_t t) {
    int64_t q = 0;
    for (; q + 4 <= w.count; q += 4) score<4, V>(w, q, turned, t);
    for (; q < w.count; q++) score<1, V>(w, q, turned, t);
}

DS_AVX512 static void score_span(const Work& w) {
    alignas(64) float turned[2 * LARGEST * KEYS];
    Rows keys(w, w.heads.keys);
    keys.begin();
    int64_t t = w.start;
    for (; t + KEYS < w.end; t += 2 * KEYS) {
        turn(w, keys, t, turned);
        turn(w, keys, t + KEYS, turned + w.heads.size * KEYS);
        score_all<2>(w, turned, t);
    }
    if (t < w.end) {
        turn(w, keys, t, turned);
        score_all<1>(w, turned, t);
    }
}

// The same with bf16 products and fp32 sums: queries are rounded to bf16, elements are multiplied in pairs.
DS_BF16 static void turn_pairs(const Work& w, Rows& keys, int64_t t, uint32_t* turned) {
    const char* row[KEYS];
    for (int64_t i = 0; i < KEYS; i++) row[i] = t + i < w.end ? keys.next() : nullptr;
    for (int64_t d = 0; d < w.heads.size; d += 32) {
        __m512i pairs[16];
        for (int i = 0; i < 16; i++)
            pairs[i] = row[i] ? _mm512_loadu_si512(row[i] + 2 * d) : _mm512_setzero_si512();
        transpose16(pairs);
        for (int i = 0; i < 16; i++) _mm512_store_si512(turned + (d / 2 + i) * KEYS, pairs[i]);
    }
}

template <int R, int V>
DS_BF16 static DS_INLINE void score_pairs(const Work& w, const uint32_t* queries, int64_t q, const uint32_t* turned,
                                          int64_t t) {
    const int64_t half = w.heads.size / 2;
    __m512 sums[R][V][2];
    for (auto& row : sums)
        for (auto& keys : row) keys[0] = keys[1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < half; p += 2)
        for (int c = 0; c < 2; c++) {
            __m512i keys[V];
            for (int v = 0; v < V; v++) keys[v] = _mm512_load_si512(turned + (v * half + p + c) * KEYS);
            for (int j = 0; j < R; j++) {
                const __m512i one = _mm512_set1_epi32(static_cast<int>(queries[(q + j) * half + p + c]));
                for (int v = 0; v < V; v++)
                    sums[j][v][c] = _mm512_dpbf16_ps(sums[j][v][c], (__m512bh)one, (__m512bh)keys[v]);
            }
        }
    for (int j = 0; j < R; j++)
        for (int v = 0; v < V; v++)
            _mm512_storeu_ps(w.scores + (q + j) * w.padded + t - w.start + v * KEYS,
                             _mm512_add_ps(sums[j][v][0], sums[j][v][1]));
}

template <int V>
DS_BF16 static DS_INLINE void score_all_pairs(const Work& w, const uint32_t* queries, const uint32_t* turned, int64_t t) {
    int64_t q = 0;
    for (; q + 4 <= w.count; q += 4) score_pairs<4, V>(w, queries, q, turned, t);
    for (; q < w.count; q++) score_pairs<1, V>(w, queries, q, turned, t);
}

DS_BF16 static void score_span_pairs(const Work& w) {
    const int64_t half = w.heads.size / 2;
    alignas(64) uint32_t turned[LARGEST * KEYS], queries[QUERIES * LARGEST / 2];
    for (int64_t q = 0; q < w.count; q++)
        for (int64_t d = 0; d < w.heads.size; d += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(queries + q * half + d / 2),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(w.query[q] + d)));
    Rows keys(w, w.heads.keys);
    keys.begin();
    int64_t t = w.start;
    for (; t + KEYS < w.end; t += 2 * KEYS) {
        turn_pairs(w, keys, t, turned);
        turn_pairs(w, keys, t + KEYS, turned + half * KEYS);
        score_all_pairs<2>(w, queries, turned, t);
    }
    if (t < w.end) {
        turn_pairs(w, keys, t, turned);
        score_all_pairs<1>(w, queries, turned, t);
    }
}

// Weighted sum for R queries: 16 · V head elements from `d` on, `count` rows of values [count, size] from `t` on.
template <int R, int V>
DS_AVX512 static DS_INLINE void mix(const Work& w, int64_t q, int64_t d, const float* values, int64_t t, int64_t count) {
    __m512 sums[R][V];
    for (int j = 0; j < R; j++)
        for (int v = 0; v < V; v++) sums[j][v] = _mm512_loadu_ps(w.out[q + j] + d + 16 * v);
    const float* weights = w.scores + q * w.padded + t - w.start;
    for (int64_t i = 0; i < count; i++)
        for (int v = 0; v < V; v++) {
            const __m512 value = _mm512_load_ps(values + i * w.heads.size + d + 16 * v);
            for (int j = 0; j < R; j++)
                sums[j][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[j * w.padded + i]), value, sums[j][v]);
        }
    for (int j = 0; j < R; j++)
        for (int v = 0; v < V; v++) _mm512_storeu_ps(w.out[q + j] + d + 16 * v, sums[j][v]);
}

template <int R>
DS_AVX512 static DS_INLINE void mix_all(const Work& w, int64_t q, const float* values, int64_t t, int64_t count) {
    int64_t d = 0;
    for (; d + 64 <= w.heads.size; d += 64) mix<R, 4>(w, q, d, values, t, count);
    for (; d < w.heads.size; d += 16) mix<R, 1>(w, q, d, values, t, count);
}

DS_AVX512 static void avx512(const Work& w) {
    const int64_t size = w.heads.size;
    alignas(64) float rows[2 * LARGEST * KEYS];
    Rows values(w, w.heads.values);
    values.begin();
    if (w.heads.kind == BF16 && size % 32 == 0 && instruction_set() >= AVX512_BF16) score_span_pairs(w);
    else score_span(w);
    float total[QUERIES];
    for (int64_t q = 0; q < w.count; q++) {
        total[q] = weigh(w, q);
        std::fill(w.out[q], w.out[q] + size, 0.0f);
    }
    for (int64_t t = w.start; t < w.end; t += 2 * KEYS) {
        const int64_t count = std::min(2 * KEYS, w.end - t);
        for (int64_t i = 0; i < count; i++) {
            const char* row = values.next();
            for (int64_t d = 0; d < size; d += 16)
                _mm512_store_ps(rows + i * size + d, sixteen(row, w.heads.kind, d));
        }
        int64_t q = 0;
        for (; q + 4 <= w.count; q += 4) mix_all<4>(w, q, rows, t, count);
        for (; q < w.count; q++) mix_all<1>(w, q, rows, t, count);
    }
    for (int64_t q = 0; q < w.count; q++)
        for (int64_t d = 0; d < size; d += 16)
            _mm512_storeu_ps(w.out[q] + d, _mm512_div_ps(_mm512_loadu_ps(w.out[q] + d), _mm512_set1_ps(total[q])));
}
#else
static void avx512(const Work& w) { plain(w); }
static void attend_in_avx2(const Work& w) { plain(w); }
static void attend_in_tiles(const Work& w) { plain(w); }
#endif

// -- all rows ---------------------------------------------------------------------------------------------------------

static void attend_span(const Pass& pass, const Heads& heads, const int64_t* span, int64_t head, int64_t first,
                        const float* queries, int64_t stride, float* out) {
    using Function = void (*)(const Work&);
    const bool tiles = instruction_set() == AMX && heads.kind == BF16 && heads.size % 32 == 0;
    const Function function = tiles ? attend_in_tiles : Versions<Function>{portable, attend_in_avx2, avx512}.pick();
    const int64_t group = heads.count / heads.cached, all = span[1] * group;
    Work w{pass, heads, pass.pages + span[3], head, 0, 0, std::min(QUERIES, all - first), {}, {}, {}, nullptr, 0};
    for (int64_t q = 0; q < w.count; q++) {
        const int64_t row = (first + q) / group, one = head * group + (first + q) % group;
        w.query[q] = queries + (span[0] + row) * stride + one * heads.size;
        w.out[q] = out + ((span[0] + row) * heads.count + one) * heads.size;
        w.position[q] = span[2] + row;
    }
    const int64_t seen = heads.window ? std::max<int64_t>(0, w.position[0] + 1 - heads.window) : 0;
    w.start = seen / (2 * KEYS) * (2 * KEYS);
    w.end = w.position[w.count - 1] + 1;
    w.padded = (w.end - w.start + KEYS - 1) / KEYS * KEYS;
    static thread_local std::vector<float> scores;
    scores.resize(static_cast<size_t>(in_tiles(w.count) * w.padded));
    w.scores = scores.data();
    function(w);
}

void attend(const Pass& pass, const Heads& heads, const float* queries, int64_t stride, float* out) {
    struct Item {
        const int64_t* span;
        int64_t head, first;
    };
    std::vector<Item> items;
    for (int64_t s = 0; s < pass.sequences; s++)
        for (int64_t head = 0; head < heads.cached; head++)
            for (int64_t first = 0; first < pass.spans[4 * s + 1] * (heads.count / heads.cached); first += QUERIES)
                items.push_back({pass.spans + 4 * s, head, first});
    const auto count = static_cast<int64_t>(items.size());
    const int useful = static_cast<int>(std::clamp<int64_t>(count / 8, 1, pass.threads));
#pragma omp parallel for schedule(dynamic, 1) num_threads(useful) if (useful > 1)
    for (int64_t i = 0; i < count; i++) {
        const Item& item = items[static_cast<size_t>(i)];
        attend_span(pass, heads, item.span, item.head, item.first, queries, stride, out);
    }
}

}  // namespace ds
