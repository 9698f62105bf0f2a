// Low-rank changes of matrices (LoRA), which differ between the rows of one pass.
#pragma once

#include "decoder.h"

namespace ds {

// Change of a matrix: y += scale · up (down x). Mirrored by `LowRank` in deepspeed/inference/executors/native_adapters.py.
struct LowRank {
    const void* down;      // [rank, inputs]
    const void* up;        // [rank, stride], from the matrix's first output on: one row per rank, not per output
    int64_t rank, stride;  // rank 0: no change
    float scale;
    Kind kind;  // FP32 or BF16
};

// Changes of one decoder layer. Mirrored by `LayerAdapter` in deepspeed/inference/executors/native_adapters.py.
struct LayerAdapter {
    LowRank q, k, v, out, gate, up, down;
};

// Consecutive rows of a pass with one adapter. Mirrored by `AdaptedRows` in …/native_adapters.py.
struct AdaptedRows {
    int64_t first, count;
    const LayerAdapter* layers;  // of the pass's first layer and those after it
};

// Matrix of a layer with its results y [rows, outputs], whose row stride is `stride`.
struct Adapted {
    LowRank LayerAdapter::*matrix;
    float* y;
    int64_t outputs, stride;
};

// Add the changes of layer number `layer` to the results of matrices with the same inputs x [rows, width]; x and y begin
// at row `first` of the pass. A row's bits do not depend on other rows.
void adapt(const Pass& pass, int64_t layer, int64_t first, int64_t rows, const float* x, int64_t width,
           const Adapted* matrices, int64_t count);

}  // namespace ds
