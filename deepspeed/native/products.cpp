// Product kernels: each reads a panel of the matrix once for a block of rows. The order of a sum is the same whatever the
// number of rows: over the columns in lanes, which are added by halves, or from one group to the next.
#include "products_parts.h"

#include <algorithm>
#include <cmath>

#include <omp.h>

#include "lossless.h"
#include "tiles.h"

namespace ds {

constexpr int64_t ROWS_BYTES = 1 << 19;  // bytes of rounded rows that are multiplied with the whole matrix together
constexpr int LARGEST = 16383;
constexpr int64_t PER_THREAD = 1 << 16;  // number of weights below which a second thread does not pay off

// -- inputs -----------------------------------------------------------------------------------------------------------

static void round_to_bf16(const float* x, uint16_t* out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = to_bf16(x[i]);
}

// Round a row to 15-bit integers, scaled by its largest value.
DS_INLINE float to_int16(const float* x, int16_t* out, float* sums, int64_t count) {
    float largest = 0.0f, nothing = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        largest = std::max(largest, std::fabs(x[i]));
        nothing += 0.0f * x[i];  // unless a value is infinite or NaN
    }
    if (nothing != 0.0f) {
        std::fill(out, out + count, static_cast<int16_t>(0));
        std::fill(sums, sums + (count + LANES - 1) / LANES, 0.0f);
        return NAN;  // which makes every output NaN
    }
    const float step = largest / LARGEST, inverse = largest > 0.0f ? LARGEST / largest : 0.0f;
    for (int64_t start = 0; start < count; start += LANES) {
        int32_t sum = 0;
        for (int64_t i = start; i < std::min(start + LANES, count); i++) {
            out[i] = static_cast<int16_t>(std::nearbyintf(x[i] * inverse));
            sum += out[i];
        }
        sums[start / LANES] = static_cast<float>(sum);
    }
    return step;
}

static float portable_to_int16(const float* x, int16_t* out, float* sums, int64_t count) {
    return to_int16(x, out, sums, count);
}
DS_AVX2 static float avx2_to_int16(const float* x, int16_t* out, float* sums, int64_t count) {
    return to_int16(x, out, sums, count);
}
DS_AVX512 static float avx512_to_int16(const float* x, int16_t* out, float* sums, int64_t count) {
    return to_int16(x, out, sums, count);
}

void Input::prepare(const float* x, int64_t count, int64_t width, Form form) {
    rows = count, columns = width, padded = (width + LANES - 1) / LANES * LANES;
    plain = x;
    tiled = wide = false;
    if (form == WHOLE) return;
    if (!halves(form)) {
        values.resize(static_cast<size_t>(2 * rows * padded));
        steps.resize(static_cast<size_t>(rows));
        sums.resize(static_cast<size_t>(rows * (padded / LANES)));
        using Function = float (*)(const float*, int16_t*, float*, int64_t);
        const Function to_int16 = Versions<Function>{portable_to_int16, avx2_to_int16, avx512_to_int16}.pick();
        for (int64_t row = 0; row < rows; row++)
            steps[static_cast<size_t>(row)] =
                to_int16(x + row * width, reinterpret_cast<int16_t*>(values.data()) + row * padded,
                               sums.data() + row * (padded / LANES), width);
#if defined(__x86_64__)
        if (form == UNSIGNED4 && instruction_set() >= AVX512)
            for (int64_t row = 0; row < rows; row++)
                split_bytes(reinterpret_cast<int16_t*>(values.data()) + row * padded, width);
#endif
        return;
    }
    const InstructionSet set = instruction_set();
    tiled = set == AMX && width % LANES == 0;
    wide = set == AVX2 || set == AVX512 || set == AVX512_VNNI;
    const int64_t whole = tiled && rows > 16 ? (rows + 15) / 16 * 16 : rows;
    values.assign(static_cast<size_t>((wide ? 4 : 2) * whole * padded), 0);
    auto* halves = reinterpret_cast<uint16_t*>(values.data());
#if defined(__x86_64__)
    if (tiled) {
        for (int64_t row = 0; row < whole; row += 16)
            to_pairs(x + row * width, reinterpret_cast<uint32_t*>(halves + row * width),
                     std::min<int64_t>(16, rows - row), std::min<int64_t>(16, whole - row), width);
        return;
    }
    if (wide) {
        const auto round = set == AVX2 ? round_to_pairs : round_to_wide;
        for (int64_t row = 0; row < rows; row++)
            round(x + row * width, reinterpret_cast<float*>(values.data()) + row * padded, width);
        return;
    }
#endif
    for (int64_t row = 0; row < rows; row++) round_to_bf16(x + row * width, halves + row * padded, width);
}

// -- portable ---------------------------------------------------------------------------------------------------------

// Add lanes by halves, like the vector code.
DS_INLINE float added(float* lanes) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

DS_INLINE float dot(const float* w, const float* x, int64_t count) {
    float lanes[16] = {};
    for (int64_t k = 0; k < count; k += 16)
        for (int64_t i = 0; i < std::min<int64_t>(16, count - k); i++) lanes[i] += w[k + i] * x[k + i];
    return added(lanes);
}

DS_INLINE float dot(const uint16_t* w, const uint16_t* x, int64_t count) {
    float lanes[16] = {};
    int64_t k = 0;
    for (; k + 32 <= count; k += 32)
        for (int i = 0; i < 16; i++) {  // becomes vectors, where indices i / 2 do not
            lanes[i] += from_bf16(w[k + 2 * i]) * from_bf16(x[k + 2 * i]);
            lanes[i] += from_bf16(w[k + 2 * i + 1]) * from_bf16(x[k + 2 * i + 1]);
        }
    for (int64_t i = 0; k + i < count; i++) lanes[i / 2] += from_bf16(w[k + i]) * from_bf16(x[k + i]);
    return added(lanes);
}

// 32 integers, widened.
DS_INLINE void integers(const Matrix& m, const uint8_t* row, int64_t k, int16_t* out) {
    if (m.form == SIGNED8)
        for (int i = 0; i < 32; i++) out[i] = static_cast<int8_t>(row[k + i]);
    else if (m.form == UNSIGNED8)
        for (int i = 0; i < 32; i++) out[i] = row[k + i];
    else
        for (int i = 0; i < 16; i++) out[2 * i] = row[k / 2 + i] & 15, out[2 * i + 1] = row[k / 2 + i] >> 4;
}

DS_INLINE float dot_integers(const Matrix& m, int64_t output, const int16_t* x) {
    const auto* row = static_cast<const uint8_t*>(m.weights) + output * row_bytes(m);
    float lanes[16] = {};
    for (int64_t k = 0; k < m.inputs;) {
        const int64_t end = std::min({k + FLUSH, (k / m.group + 1) * m.group, m.inputs});
        int32_t sums[16] = {};
        for (; k < end; k += 32) {
            int16_t w[32];
            integers(m, row, k, w);
            for (int i = 0; i < 16; i++) sums[i] += w[2 * i] * x[k + 2 * i] + w[2 * i + 1] * x[k + 2 * i + 1];
        }
        const float scale = m.scale[output * (m.inputs / m.group) + (end - 1) / m.group];
        for (int i = 0; i < 16; i++) lanes[i] += static_cast<float>(sums[i]) * scale;
    }
    return added(lanes);
}

static void portable(const Part& p) {
    const Matrix& m = p.matrix;
    const auto* halves = reinterpret_cast<const uint16_t*>(p.x.values.data());
    for (int64_t r = 0; r < p.rows; r++)
        for (int64_t n = 0; n < p.outputs; n++) {
            const int64_t output = p.output + n, row = p.row + r;
            float& sum = p.sums[r][n];
            if (m.form == WHOLE)
                sum = dot(static_cast<const float*>(m.weights) + output * m.inputs, p.x.plain + row * m.inputs,
                          m.inputs);
            else if (m.form == HALF)
                sum = dot(static_cast<const uint16_t*>(m.weights) + output * m.inputs, halves + row * p.x.padded,
                          m.inputs);
            else
                sum = finish(p, output, row,
                             dot_integers(m, output, reinterpret_cast<const int16_t*>(halves) + row * p.x.padded));
        }
}

// -- the product ------------------------------------------------------------------------------------------------------

static Kernel kernel_of(const Matrix& matrix, const Input& x) {
#if defined(__x86_64__)
    if (x.tiled) return tiles;
    if (instruction_set() >= AVX512) return vectors(matrix, x);
    if (instruction_set() == AVX2) return avx2_vectors(matrix.form);
#endif
    return {portable, 32};
}

DS_INLINE void write_sums(const Part& p, float* y, int64_t stride, bool add) {
    alignas(64) float bias[PANEL] = {};
    if (p.matrix.bias)
        for (int64_t n = 0; n < p.outputs; n++)
            bias[n] = p.matrix.bias_kind == FP32
                          ? static_cast<const float*>(p.matrix.bias)[p.output + n]
                          : from_bf16(static_cast<const uint16_t*>(p.matrix.bias)[p.output + n]);
    for (int64_t r = 0; r < p.rows; r++) {
        float* out = y + (p.row + r) * stride + p.output;
        if (add)
            for (int64_t n = 0; n < p.outputs; n++) out[n] += p.sums[r][n] + bias[n];
        else
            for (int64_t n = 0; n < p.outputs; n++) out[n] = p.sums[r][n] + bias[n];
    }
}

static void portable_write(const Part& p, float* y, int64_t stride, bool add) { write_sums(p, y, stride, add); }
DS_AVX2 static void avx2_write(const Part& p, float* y, int64_t stride, bool add) { write_sums(p, y, stride, add); }
DS_AVX512 static void avx512_write(const Part& p, float* y, int64_t stride, bool add) { write_sums(p, y, stride, add); }

// Unpack outputs of a LOSSLESS matrix to bf16, for kernels without LOSSLESS support.
static Matrix unpacked(const Matrix& matrix, int64_t output, int64_t outputs, std::vector<uint16_t>& room) {
    room.resize(static_cast<size_t>(PANEL * matrix.inputs + 32));
    auto* lines = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
    unpack(matrix, output, outputs, lines);
    Matrix made = matrix;
    made.form = HALF, made.weights = lines, made.outputs = outputs;
    return made;
}

using Write = void (*)(const Part&, float*, int64_t, bool);

// The part of one product over rows [first, end) that this thread computes.
static void multiply_part(const Product& product, const Input& x, int64_t first, int64_t end, const Kernel& kernel,
                          Write write, int64_t stride, bool add) {
    static thread_local std::vector<uint16_t> room;
    const Matrix& matrix = *product.matrix;
    const bool unpacks = matrix.form == LOSSLESS && !kernel.lossless;
    const int64_t panels = (matrix.outputs + PANEL - 1) / PANEL;
    const int64_t block = kernel.rows, blocks = (end - first + block - 1) / block;
    const int64_t at_once = unpacks && blocks == 1 ? kernel.unpacked : PANEL;
#pragma omp for schedule(static) nowait
    for (int64_t panel = 0; panel < panels; panel++) {
        alignas(64) float sums[MOST_ROWS][PANEL];
        const int64_t output = panel * PANEL, outputs = std::min(PANEL, matrix.outputs - output);
        const char* next = static_cast<const char*>(matrix.weights) + (output + outputs) * row_bytes(matrix);
        const int64_t share = (std::min(at_once, outputs) * row_bytes(matrix) / blocks + 63) / 64 * 64;
        Matrix read = matrix;
        for (int64_t row = first; row < end; row += block) {
            const int64_t rows = std::min(block, end - row);
            for (int64_t n = 0; n < outputs; n += at_once, next += share) {
                const int64_t count = std::min(at_once, outputs - n);
                if (unpacks && row == first) read = unpacked(matrix, output + n, count, room);
                auto* at = reinterpret_cast<float(*)[PANEL]>(&sums[0][n]);
                kernel.run({read, x, unpacks ? 0 : output, count, row, rows, at, next, share});
            }
            write({matrix, x, output, outputs, row, rows, sums, next, share}, product.y, stride, add);
        }
    }
}

void multiply(const Product* products, int64_t count, const Input& x, int64_t stride, bool add, int threads) {
    if (!x.rows) return;
    const Matrix& matrix = *products->matrix;
    const Kernel kernel = kernel_of(matrix, x);
    const Write write = Versions<Write>{portable_write, avx2_write, avx512_write}.pick();
    // Number of rows that stay in cache while the matrix is read.
    const int64_t block = kernel.rows, bytes = std::max<int64_t>(1, (x.wide ? 4 : 2) * x.padded);
    const int64_t chunk = std::max(block, ROWS_BYTES / bytes / block * block);
    int64_t weights = 0;
    for (int64_t i = 0; i < count; i++) weights += products[i].matrix->outputs * matrix.inputs;
    const int useful = static_cast<int>(std::clamp<int64_t>(weights / PER_THREAD, 1, threads));
#pragma omp parallel num_threads(useful) if (useful > 1)
    {
#if defined(__x86_64__)
        if (x.tiled) begin_tiles(x.rows);
#endif
        for (int64_t first = 0; first < x.rows; first += chunk)
            for (int64_t i = 0; i < count; i++)
                multiply_part(products[i], x, first, std::min(first + chunk, x.rows), kernel, write, stride, add);
#if defined(__x86_64__)
        if (x.tiled) end_tiles();
#endif
    }
}

}  // namespace ds

extern "C" void ds_product(const ds::Matrix* matrix, const float* x, int64_t rows, float* y, int threads) {
    ds::Input input;
    input.prepare(x, rows, matrix->inputs, matrix->form);
    ds::multiply(*matrix, input, y, matrix->outputs, false, threads);
}
