// Common code of the attention kernels: rows of one sequence and head, their keys and values, and the softmax.
#pragma once

#include <algorithm>
#include <cmath>

#include "decoder.h"
#include "tiles.h"

namespace ds {

constexpr int64_t QUERIES = 32;  // queries of one key-value head that read its keys together
constexpr int64_t KEYS = 16;     // keys scored together; a block begins at a multiple of it
constexpr int64_t LARGEST = 512;  // maximum head size, LARGEST_HEAD in deepspeed/inference/executors/native.py

// Rows of one sequence and one key-value head.
struct Work {
    const Pass& pass;
    const Heads& heads;
    const int64_t* pages;
    int64_t head, start, end;    // positions of the keys: start is a multiple of 2 · KEYS
    int64_t count;               // queries
    const float* query[QUERIES];
    int64_t position[QUERIES];
    float* out[QUERIES];
    float* scores;  // [in_tiles(count), padded]
    int64_t padded;
};

// Number of allocated score rows for `count` queries: tiles write sixteen rows, or a single one.
DS_INLINE int64_t in_tiles(int64_t count) { return count == 1 ? 1 : (count + 15) / 16 * 16; }

// Rows of keys or values at consecutive positions. Rows of one head are far apart in memory, so hardware prefetching
// does not work: reading a row prefetches the row one page ahead.
class Rows {
public:
    Rows(const Work& work, const void* rows)
        : w(work), pool(static_cast<const char*>(rows)), position(w.start),
          row_bytes(w.heads.size * width(w.heads.kind)), stride(w.heads.cached * row_bytes) {}

    DS_INLINE const char* next() {
        if (!left) enter();
        const char* found = at;
        if (ahead) fetch(ahead), ahead += stride;
        at += stride, position++, left--;
        return found;
    }

    // Prefetch the rows of the first page.
    void begin() {
        enter();
        for (int64_t i = 0; i < std::min(left, w.end - position); i++) fetch(at + i * stride);
    }

private:
    DS_INLINE const char* row(int64_t which) const {
        return pool + slot(w.pass, w.pages, which) * stride + w.head * row_bytes;
    }
    DS_INLINE void fetch(const char* from) const {
        for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(from + i);
    }
    DS_INLINE void enter() {  // looks up each page once
        at = row(position);
        left = w.pass.page_size - position % w.pass.page_size;
        ahead = position + left < w.end ? row(position + left) : nullptr;
    }

    const Work& w;
    const char *pool, *at = nullptr, *ahead = nullptr;
    int64_t position, row_bytes, stride, left = 0;
};

DS_INLINE void load(const char* row, Kind kind, float* out, int64_t count) {
    if (kind == FP32) std::memcpy(out, row, static_cast<size_t>(4 * count));
    else widen(reinterpret_cast<const uint16_t*>(row), kind, out, count);
}

// -- softmax ----------------------------------------------------------------------------------------------------------

// Convert scores to softmax weights; returns the divisor of their weighted sum.
DS_INLINE float weigh(const Work& w, int64_t q) {
    float* scores = w.scores + q * w.padded;
    const int64_t first = w.heads.window ? std::max<int64_t>(0, w.position[q] + 1 - w.heads.window) - w.start : 0;
    const int64_t end = w.position[q] + 1 - w.start, whole = (end + KEYS - 1) / KEYS * KEYS;
    std::fill(scores, scores + first, -INFINITY);
    std::fill(scores + end, scores + whole, -INFINITY);
    alignas(64) float lanes[KEYS], largest = -INFINITY;
    std::fill(lanes, lanes + KEYS, -INFINITY);
    for (int64_t t = 0; t < whole; t += KEYS)
        for (int64_t i = 0; i < KEYS; i++) {
            scores[t + i] *= w.heads.scale;
            lanes[i] = scores[t + i] > lanes[i] ? scores[t + i] : lanes[i];
        }
    for (float lane : lanes) largest = std::max(largest, lane);
    std::fill(lanes, lanes + KEYS, 0.0f);
    for (int64_t t = 0; t < whole; t += KEYS)
        for (int64_t i = 0; i < KEYS; i++) {
            const float weight = exponential(scores[t + i] - largest);
            scores[t + i] = weight;
            lanes[i] += weight;
        }
    std::fill(scores + whole, scores + w.padded, 0.0f);
    for (int64_t half = KEYS / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#if defined(__x86_64__)
// AMX kernel for bf16 and head sizes that are multiples of 32.
void attend_in_tiles(const Work& w);

void attend_in_avx2(const Work& w);
#endif

}  // namespace ds
