// Common code of the product kernels: the unit of work, and the scaling of integer sums.
#pragma once

#include "products.h"

namespace ds {

constexpr int64_t PANEL = 32;   // outputs of a unit of work
constexpr int64_t LANES = 32;   // columns of a step
constexpr int64_t FLUSH = 1024;  // columns with integer products that fit into 32 bits: 128 · LARGEST · 1024 < 2³¹

// Unit of work: sums[row][output] for rows [row, row + rows) and outputs [output, output + outputs). A kernel may also
// write sums of outputs past the end.
struct Part {
    const Matrix& matrix;
    const Input& x;
    int64_t output, outputs, row, rows;
    float (*sums)[PANEL];
    const char* next;       // memory to prefetch meanwhile: this block's share of the next unit's outputs
    int64_t next_bytes;
};

// Product kernel, and the number of rows that it processes together.
struct Kernel {
    void (*run)(const Part&);
    int64_t rows;
    bool lossless = false;  // reads LOSSLESS matrices directly; other kernels get unpacked bf16 outputs
    int64_t unpacked = PANEL;  // number of outputs that are unpacked at once, if one block has all rows
};
constexpr int64_t MOST_ROWS = 60;

// Sum of offsets times the input sums of their groups: sixteen partial sums, since one would wait for itself.
DS_INLINE float offsets(const Matrix& m, int64_t output, const float* sums) {
    constexpr int64_t WIDE = 16;
    const int64_t groups = m.inputs / m.group, parts = m.group / LANES;
    const float* offset = m.offset + output * groups;
    float partial[WIDE] = {};
    int64_t g = 0;
    if (parts == 1)
        for (; g + WIDE <= groups; g += WIDE)
            for (int64_t i = 0; i < WIDE; i++) partial[i] += offset[g + i] * sums[g + i];
    for (; g < groups; g++) {
        float of_group = 0.0f;
        for (int64_t i = 0; i < parts; i++) of_group += sums[g * parts + i];
        partial[g % WIDE] += offset[g] * of_group;
    }
    for (int64_t half = WIDE / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) partial[i] += partial[i + half];
    return partial[0];
}

DS_INLINE float finish(const Part& p, int64_t output, int64_t row, float sum) {
    if (p.matrix.offset) sum += offsets(p.matrix, output, p.x.sums.data() + row * (p.x.padded / LANES));
    return sum * p.x.steps[static_cast<size_t>(row)];
}

#if defined(__x86_64__)
// AVX-512 kernel for matrices of any form.
Kernel vectors(const Matrix& matrix, const Input& x);

// AVX2 kernel for matrices of any form.
Kernel avx2_vectors(Form form);

// Round a row to bf16 and store it as fp32: in each 32 columns the even ones, then the odd ones; zero-padded.
void round_to_wide(const float* x, float* out, int64_t count);
void round_to_pairs(const float* x, float* out, int64_t count);  // the same with AVX2, into zeros

// Split 15-bit integers into signed bytes, high · 128 + low with low in [0, 127], in the order of the 4-bit kernel.
void split_bytes(int16_t* row, int64_t count);

// AMX kernel; runs between a thread's `begin_tiles` and `end_tiles`.
extern const Kernel tiles;
void begin_tiles(int64_t rows);
void end_tiles();
#endif

}  // namespace ds
