// Matrix products y = x Wᵀ with the model's matrices in place. The order of each sum depends only on the inner
// dimension, so a row's bits do not depend on the number of other rows.
#pragma once

#include <vector>

#include "numbers.h"

namespace ds {

// In the order of FORMS in deepspeed/inference/executors/native_tensors.py.
enum Form : int32_t { WHOLE, HALF, SIGNED8, UNSIGNED8, UNSIGNED4, LOSSLESS };

inline bool halves(Form form) { return form == HALF || form == LOSSLESS; }

// Mirrored by `Matrix` in deepspeed/inference/executors/native_tensors.py.
struct Matrix {
    const void* weights;  // [outputs, inputs], contiguous; 4 bits: the even column is the low half of a byte;
                          // LOSSLESS: [outputs / 4, inputs / 64, 4, 96], see lossless.h
    const float* scale;   // [outputs, inputs / group], for integers
    const float* offset;  // the same shape; null: zero
    const void* bias;     // [outputs] or null
    const uint16_t* exponents;  // LOSSLESS: [32], the sixteen exponents twice, by code, in bf16 bit position
    const int32_t* starts;      // [outputs / 4 + 1]: first escape of each four outputs in the next two arrays
    const int32_t* places;      // column · 4 + index in the four outputs, ascending
    const uint16_t* values;
    int64_t outputs, inputs, group;
    Form form;
    Kind bias_kind;
};

inline int64_t row_bytes(const Matrix& matrix) {
    const int64_t columns = matrix.inputs;
    return matrix.form == WHOLE ? 4 * columns : matrix.form == HALF ? 2 * columns
           : matrix.form == UNSIGNED4 ? columns / 2 : matrix.form == LOSSLESS ? columns * 3 / 2 : columns;
}

// Element of an integer matrix.
DS_INLINE int32_t integer(const Matrix& m, int64_t output, int64_t k) {
    const auto* bytes = static_cast<const uint8_t*>(m.weights) + output * row_bytes(m);
    if (m.form == SIGNED8) return static_cast<int8_t>(bytes[k]);
    return m.form == UNSIGNED8 ? bytes[k] : bytes[k / 2] >> (k % 2 * 4) & 15;
}

// Input rows, converted for the product with one form of matrix.
struct Input {
    int64_t rows = 0, columns = 0, padded = 0;  // padded: columns rounded up to whole vectors, with zeros
    bool tiled = false;                         // blocks of 16 rows: pairs of columns outside, rows inside
    bool wide = false;                          // bf16 values as fp32, in the order of `round_to_wide`
    std::vector<char> values;
    std::vector<float> steps, sums;  // for integers: scale of each row; sums of a row's integers by group of 32
    const float* plain = nullptr;

    // Convert `x` [rows, columns] for matrices of `form`.
    void prepare(const float* x, int64_t rows, int64_t columns, Form form);
};

struct Product {
    const Matrix* matrix;
    float* y;  // [row, 0 … outputs)
};

// y = x Wᵀ + bias for each matrix, added to y if `add`; `stride` is the row stride of every y. The matrices have one
// form. Threads wait for each other once, at the end.
void multiply(const Product* products, int64_t count, const Input& x, int64_t stride, bool add, int threads);

inline void multiply(const Matrix& matrix, const Input& x, float* y, int64_t stride, bool add, int threads) {
    const Product product{&matrix, y};
    multiply(&product, 1, x, stride, add, threads);
}

}  // namespace ds
