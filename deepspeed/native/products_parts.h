// What the forms of the product share: a unit of their work, and the end of a sum of integers.
#pragma once

#include "products.h"

namespace ds {

constexpr int64_t PANEL = 32;   // outputs of a unit of work
constexpr int64_t LANES = 32;   // columns of a step
constexpr int64_t FLUSH = 1024;  // columns whose integer products fit into 32 bits: 128 · LARGEST · 1024 < 2³¹

// What a kernel computes: sums[row][output] of rows [row, row + rows) and outputs [output, output + outputs). It may
// write sums of outputs that are not there.
struct Part {
    const Matrix& matrix;
    const Input& x;
    int64_t output, outputs, row, rows;
    float (*sums)[PANEL];
    int64_t block, blocks;  // this is one of so many blocks of rows that go through these outputs
};

// A form of the product, and the rows that it takes through a panel together.
struct Kernel {
    void (*run)(const Part&);
    int64_t rows;
    bool lossless = false;  // unpacks such matrices itself; the others are given panels of bf16
};
constexpr int64_t MOST_ROWS = 60;

// Offsets times the sums of the input over their groups.
DS_INLINE float offsets(const Matrix& m, int64_t output, const float* sums) {
    float total = 0.0f;
    const int64_t groups = m.inputs / m.group, parts = m.group / LANES;
    for (int64_t g = 0; g < groups; g++)
        for (int64_t i = 0; i < parts; i++) total += m.offset[output * groups + g] * sums[g * parts + i];
    return total;
}

DS_INLINE float finish(const Part& p, int64_t output, int64_t row, float sum) {
    sum *= p.x.steps[static_cast<size_t>(row)];
    return p.matrix.offset ? sum + offsets(p.matrix, output, p.x.sums.data() + row * (p.x.padded / LANES)) : sum;
}

#if defined(__x86_64__)
// The form in vectors of AVX-512, of matrices of any form.
Kernel vectors(const Matrix& matrix, const Input& x);

// A row rounded to bf16, as fp32: of each 32 columns the even ones, then the odd ones; zeros up to a whole step.
void round_to_wide(const float* x, float* out, int64_t count);

// The form in matrix tiles, between a thread's `begin_tiles` and `end_tiles`.
extern const Kernel tiles;
void begin_tiles(int64_t rows);
void end_tiles();
#endif

}  // namespace ds
