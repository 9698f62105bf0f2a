// Products with matrices that stay where a model holds them, y = x Wᵀ, in sums whose order depends on the inner
// dimension alone: a row's bits do not depend on how many other rows there are.
#pragma once

#include <vector>

#include "numbers.h"

namespace ds {

// In the order of FORMS in deepspeed/inference/executors/native_tensors.py.
enum Form : int32_t { WHOLE, HALF, SIGNED8, UNSIGNED8, UNSIGNED4, LOSSLESS };

inline bool halves(Form form) { return form == HALF || form == LOSSLESS; }

// Mirrored by `Matrix` in deepspeed/inference/executors/native_tensors.py.
struct Matrix {
    const void* weights;  // [outputs, inputs] in rows without gaps; 4 bits: the even column is the low half of a byte;
                          // LOSSLESS: [outputs / 4, inputs / 64, 4, 96], as lossless.h has it
    const float* scale;   // [outputs, inputs / group], of integers
    const float* offset;  // the same, or null: zero
    const void* bias;     // [outputs] or null
    const uint16_t* exponents;  // of LOSSLESS: [32], by code, as they stand in a bf16, the sixteen twice
    const int32_t* starts;      // [outputs / 4 + 1]: where each four outputs' escapes begin in the next two
    const int32_t* places;      // column · 4 + which of the four outputs, ascending
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

// An element of a matrix of integers.
DS_INLINE int32_t integer(const Matrix& m, int64_t output, int64_t k) {
    const auto* bytes = static_cast<const uint8_t*>(m.weights) + output * row_bytes(m);
    if (m.form == SIGNED8) return static_cast<int8_t>(bytes[k]);
    return m.form == UNSIGNED8 ? bytes[k] : bytes[k / 2] >> (k % 2 * 4) & 15;
}

// Rows of an input as the product with a kind of matrix wants them.
struct Input {
    int64_t rows = 0, columns = 0, padded = 0;  // padded: to whole vectors, with zeros
    bool tiled = false;                         // in blocks of 16 rows, pairs of columns outside, rows inside
    bool wide = false;                          // halves as fp32, as `round_to_wide` orders them
    std::vector<char> values;
    std::vector<float> steps, sums;  // of integers: value of one by row; sums of a row's values by group of 32
    const float* plain = nullptr;

    // Read `x` [rows, columns], for matrices of `form`.
    void prepare(const float* x, int64_t rows, int64_t columns, Form form);
};

// y[row, 0 … outputs) = x Wᵀ + bias, or that added to what y holds; rows of y lie `stride` apart.
void multiply(const Matrix& matrix, const Input& x, float* y, int64_t stride, bool add, int threads);

}  // namespace ds
