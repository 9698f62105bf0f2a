// Attention in AVX2. Products of a query and a key run in sixteen lanes, which are added in one tree; a weighted sum runs
// in the order of the keys. So a row's bits depend only on positions.
#include "attention.h"
#include "vectors.h"

#if defined(__x86_64__)
namespace ds {

constexpr int64_t VALUES = 32;  // keys or values that are read together
constexpr int64_t EARLY = 48;   // keys between the one that is scored and the one whose page's successor is fetched

// Rows of keys or values in fp32: those in memory, or widened ones.
struct WideRows {
    const float* row[VALUES];
    alignas(32) float wide[VALUES * LARGEST];

    DS_AVX2 DS_INLINE void read(Rows& rows, const Work& w, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const char* next = rows.next();
            row[i] = reinterpret_cast<const float*>(next);
            if (w.heads.kind == FP32) continue;
            float* to = wide + i * w.heads.size;
            widen(reinterpret_cast<const uint16_t*>(next), BF16, to, w.heads.size);
            row[i] = to;
        }
    }
};

// Score Q queries with four keys, first eight lanes and then the others.
template <int Q> DS_AVX2 static DS_INLINE void score(const Work& w, int64_t q, const float* const* keys, float* scores) {
    alignas(32) float held[4][Q][8];
    __m256 sums[4][Q];
    for (int64_t half = 0; half < 2; half++) {
        for (auto& key : sums)
            for (auto& sum : key) sum = _mm256_setzero_ps();
        for (int64_t d = 8 * half; d < w.heads.size; d += 16) {
            __m256 queries[Q];
            for (int j = 0; j < Q; j++) queries[j] = _mm256_loadu_ps(w.query[q + j] + d);
            for (int i = 0; i < 4; i++) {
                const __m256 key = _mm256_loadu_ps(keys[i] + d);
                for (int j = 0; j < Q; j++) sums[i][j] = _mm256_fmadd_ps(key, queries[j], sums[i][j]);
            }
        }
        if (half) break;
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < Q; j++) _mm256_store_ps(held[i][j], sums[i][j]);
    }
    for (int j = 0; j < Q; j++) {
        __m256 eight[4];
        for (int i = 0; i < 4; i++) eight[i] = _mm256_add_ps(_mm256_load_ps(held[i][j]), sums[i][j]);
        _mm_storeu_ps(scores + j * w.padded, add_lanes(eight));
    }
}

// Add 8 · V elements of `count` weighted values to the output of a query.
template <int V>
DS_AVX2 static DS_INLINE void mix(float* out, const float* weights, const float* const* values, int64_t d, int64_t count) {
    __m256 sums[V];
    for (int v = 0; v < V; v++) sums[v] = _mm256_loadu_ps(out + d + 8 * v);
    for (int64_t i = 0; i < count; i++) {
        const __m256 weight = _mm256_broadcast_ss(weights + i);
        for (int v = 0; v < V; v++)
            sums[v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values[i] + d + 8 * v), sums[v]);
    }
    for (int v = 0; v < V; v++) _mm256_storeu_ps(out + d + 8 * v, sums[v]);
}

DS_AVX2 void attend_in_avx2(const Work& w) {
    const int64_t size = w.heads.size;
    WideRows rows;
    Rows keys(w, w.heads.keys), values(w, w.heads.values);
    Rows early_keys(w, w.heads.keys), early_values(w, w.heads.values);  // fetch what is read later
    early_keys.begin();
    early_values.begin();
    for (int64_t t = w.start, early = t; t < w.end; t += 4) {
        const int64_t count = std::min<int64_t>(4, w.end - t);
        for (; early < std::min(t + EARLY, w.end); early++) early_keys.next();
        for (int64_t i = 0; i < count; i++) early_values.next();
        rows.read(keys, w, count);
        for (int64_t i = count; i < 4; i++) rows.row[i] = rows.row[0];  // scores past the end are not used
        float* scores = w.scores + t - w.start;
        int64_t q = 0;
        for (; q + 3 <= w.count; q += 3) score<3>(w, q, rows.row, scores + q * w.padded);
        if (q + 2 == w.count) score<2>(w, q, rows.row, scores + q * w.padded);
        else if (q < w.count) score<1>(w, q, rows.row, scores + q * w.padded);
    }
    float total[QUERIES];
    for (int64_t q = 0; q < w.count; q++) {
        total[q] = weigh(w, q);
        std::fill(w.out[q], w.out[q] + size, 0.0f);
    }
    for (int64_t t = w.start; t < w.end; t += VALUES) {
        rows.read(values, w, std::min(VALUES, w.end - t));
        for (int64_t q = 0; q < w.count; q++) {
            const int64_t count = std::min(VALUES, w.position[q] + 1 - t);
            const float* weights = w.scores + q * w.padded + t - w.start;
            int64_t d = 0;
            for (; d + 64 <= size; d += 64) mix<8>(w.out[q], weights, rows.row, d, count);
            for (; d < size; d += 16) mix<2>(w.out[q], weights, rows.row, d, count);
        }
    }
    for (int64_t q = 0; q < w.count; q++)
        for (int64_t d = 0; d < size; d++) w.out[q][d] /= total[q];
}

}  // namespace ds
#endif
