// One pass of rows of several sequences through a decoder's layers, with attention.
#pragma once

#include "products.h"

namespace ds {

struct AdaptedRows;  // adapters.h

// Mirrored by `Pass` in deepspeed/inference/executors/native_tensors.py.
struct Pass {
    float* x;               // [rows, width], changed in place
    const int64_t* spans;   // [sequences, 4]: first row, rows, first position, index of its first page in `pages`
    const int64_t* pages;   // of all sequences; one page of zeros precedes page 0
    const float* cosines;   // [positions, rotary]
    const float* sines;
    const AdaptedRows* adapters;  // [adapted], in order of their rows; other rows have no adapter
    int64_t rows, sequences, page_size, adapted;
    int32_t threads;
};

// Mirrored by `Heads` in deepspeed/inference/executors/native_tensors.py.
struct Heads {
    void* keys;    // [slots, cached heads, size]
    void* values;  // the same
    int64_t count, cached, size, rotary, window;  // window 0: causal, without limit
    float scale;
    Kind kind;  // dtype of keys and values
};

// Computes out[row, heads · size] from queries [row, …] with row stride `stride`; keys and values are read from pages.
void attend(const Pass& pass, const Heads& heads, const float* queries, int64_t stride, float* out);

// Cache slot of a position of a sequence.
inline int64_t slot(const Pass& pass, const int64_t* pages, int64_t position) {
    return (pages[position / pass.page_size] + 1) * pass.page_size + position % pass.page_size;
}

// eˣ for x ≤ 0 within 2 units in the last place; below -87 it is 0.
DS_INLINE float exponential(float x) {
    const float clipped = x < -87.0f ? -87.0f : x;
    const float shifted = clipped * 1.44269504f + 12582912.0f;  // 1.5 · 2²³: rounds to an integer
    const float n = shifted - 12582912.0f;
    const float r = (clipped - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f / 720.0f + r * (1.0f / 5040.0f);
    p = 1.0f / 120.0f + r * p;
    p = 1.0f / 24.0f + r * p;
    p = 1.0f / 6.0f + r * p;
    p = 0.5f + r * p;
    p = 1.0f + r * (1.0f + r * p);
    const float power = as_float((as_bits(shifted) << 23) + 0x3f800000u);
    return x < -87.0f ? 0.0f : p * power;
}

}  // namespace ds
