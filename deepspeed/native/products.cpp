// Forms of the product: each reads a panel of the matrix once for a block of rows. Sums run over the columns in lanes,
// and the lanes are added in one order, whatever the number of rows.
#include "products.h"

#include <algorithm>
#include <cmath>

#include <omp.h>

#include "tiles.h"

namespace ds {

constexpr int64_t PANEL = 32;   // outputs of a unit of work
constexpr int64_t BLOCK = 32;   // rows that are taken through a panel together
constexpr int64_t LANES = 32;   // columns of a step
constexpr int64_t ROWS_BYTES = 1 << 19;  // of rounded rows that are taken through the whole matrix together
constexpr int64_t FLUSH = 1024;  // columns whose integer products fit into 32 bits: 128 · LARGEST · 1024 < 2³¹
constexpr int LARGEST = 16383;
constexpr int64_t PER_THREAD = 1 << 16;  // weights below which a second thread costs more than it brings

// What a kernel computes: sums[row][output] of rows [row, row + rows) and outputs [output, output + outputs).
struct Part {
    const Matrix& matrix;
    const Input& x;
    int64_t output, outputs, row, rows;
    float (*sums)[PANEL];
    int64_t block, blocks;  // this is one of so many blocks of rows that go through these outputs
};

// -- inputs -----------------------------------------------------------------------------------------------------------

static void round_to_bf16(const float* x, uint16_t* out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = to_bf16(x[i]);
}

// Integers of 15 bits, the largest of the row at their end.
DS_INLINE float to_int16(const float* x, int16_t* out, float* sums, int64_t count) {
    float largest = 0.0f, nothing = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        largest = std::max(largest, std::fabs(x[i]));
        nothing += 0.0f * x[i];  // unless one is infinite or no number
    }
    if (nothing != 0.0f) {
        std::fill(out, out + count, static_cast<int16_t>(0));
        std::fill(sums, sums + (count + LANES - 1) / LANES, 0.0f);
        return NAN;  // and every output with it
    }
    const float step = largest / LARGEST, inverse = largest > 0.0f ? LARGEST / largest : 0.0f;
    for (int64_t start = 0; start < count; start += LANES) {
        int32_t sum = 0;
        for (int64_t i = start; i < std::min(start + LANES, count); i++) {
            out[i] = static_cast<int16_t>(std::nearbyintf(x[i] * inverse));
            sum += out[i];
        }
        sums[start / LANES] = step * static_cast<float>(sum);
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
    tiled = false;
    if (form == WHOLE) return;
    if (form != HALF) {
        values.resize(static_cast<size_t>(2 * rows * padded));
        steps.resize(static_cast<size_t>(rows));
        sums.resize(static_cast<size_t>(rows * (padded / LANES)));
        using Function = float (*)(const float*, int16_t*, float*, int64_t);
        const Function to_int16 = Versions<Function>{portable_to_int16, avx2_to_int16, avx512_to_int16}.pick();
        for (int64_t row = 0; row < rows; row++)
            steps[static_cast<size_t>(row)] =
                to_int16(x + row * width, reinterpret_cast<int16_t*>(values.data()) + row * padded,
                               sums.data() + row * (padded / LANES), width);
        return;
    }
    const bool tiles = instruction_set() == AMX && width % LANES == 0;
    const int64_t whole = tiles && rows > 16 ? (rows + 15) / 16 * 16 : rows;
    values.assign(static_cast<size_t>(2 * whole * padded), 0);
    auto* halves = reinterpret_cast<uint16_t*>(values.data());
    if (!tiles) {
        for (int64_t row = 0; row < rows; row++) round_to_bf16(x + row * width, halves + row * padded, width);
        return;
    }
#if defined(__x86_64__)
    tiled = true;
    for (int64_t row = 0; row < whole; row += 16)
        to_pairs(x + row * width, reinterpret_cast<uint32_t*>(halves + row * width), std::min<int64_t>(16, rows - row),
                 std::min<int64_t>(16, whole - row), width);
#endif
}

// -- portable ---------------------------------------------------------------------------------------------------------

// Lanes are added by halves, as vectors do it.
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
    for (int64_t k = 0; k < count; k += 32)
        for (int64_t i = 0; i < std::min<int64_t>(32, count - k); i++)
            lanes[i / 2] += from_bf16(w[k + i]) * from_bf16(x[k + i]);
    return added(lanes);
}

DS_INLINE float dot_integers(const Matrix& m, int64_t output, const int16_t* x) {
    float lanes[16] = {};
    for (int64_t k = 0; k < m.inputs;) {
        const int64_t end = std::min({k + FLUSH, (k / m.group + 1) * m.group, m.inputs});
        int32_t sums[16] = {};
        for (; k < end; k++) sums[k % 32 / 2] += integer(m, output, k) * x[k];
        const float scale = m.scale[output * (m.inputs / m.group) + (end - 1) / m.group];
        for (int i = 0; i < 16; i++) lanes[i] += static_cast<float>(sums[i]) * scale;
    }
    return added(lanes);
}

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

DS_INLINE void plain(const Part& p) {
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

static void portable(const Part& p) { plain(p); }
DS_AVX2 static void avx2(const Part& p) { plain(p); }

#if defined(__x86_64__)
// -- vectors ----------------------------------------------------------------------------------------------------------

struct Whole {
    static constexpr int64_t STEP = 16;
    using X = float;
    DS_AVX512 static DS_INLINE __m512i load(const char* w, int64_t k, int64_t left) {
        const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
        return _mm512_maskz_loadu_epi32(mask, reinterpret_cast<const float*>(w) + k);
    }
    DS_AVX512 static DS_INLINE __m512 step(__m512 sum, __m512i w, const float* x, int64_t left) {
        const __m512i other = load(reinterpret_cast<const char*>(x), 0, left);
        return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(other), sum);
    }
};

struct Half {
    static constexpr int64_t STEP = 32;
    using X = uint16_t;
    DS_AVX512 static DS_INLINE __m512i load(const char* w, int64_t k, int64_t left) {
        const __mmask32 mask = left >= 32 ? 0xffffffff : (1u << left) - 1;
        return _mm512_maskz_loadu_epi16(mask, reinterpret_cast<const uint16_t*>(w) + k);
    }
};

// Without an instruction for it: even columns, then odd ones.
struct HalfWidened : Half {
    DS_AVX512 static DS_INLINE __m512 step(__m512 sum, __m512i w, const uint16_t* x, int64_t) {
        const __m512i other = _mm512_loadu_si512(x), high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(other, 16)), sum);
        return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, high)),
                               _mm512_castsi512_ps(_mm512_and_si512(other, high)), sum);
    }
};

struct HalfPairs : Half {
    DS_BF16 static DS_INLINE __m512 step(__m512 sum, __m512i w, const uint16_t* x, int64_t) {
        return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_loadu_si512(x));
    }
};

// N outputs times R rows. With the first rows a matrix comes from memory, one output after the other: one stream, which
// processors fetch ahead by themselves (four side by side came at half the rate). The others find it in the cache.
#define DS_FLOATING(NAME, TARGET, DOT)                                                                                 \
    template <int N, int R> TARGET static DS_INLINE void NAME##_tile(const Part& p, int64_t n, int64_t r) {            \
        const int64_t bytes = row_bytes(p.matrix), columns = p.matrix.inputs;                                          \
        const char* w = static_cast<const char*>(p.matrix.weights) + (p.output + n) * bytes;                           \
        const auto* x = (sizeof(DOT::X) == 4 ? reinterpret_cast<const DOT::X*>(p.x.plain)                              \
                                             : reinterpret_cast<const DOT::X*>(p.x.values.data())) +                   \
                        (p.row + r) * (sizeof(DOT::X) == 4 ? columns : p.x.padded);                                    \
        const int64_t stride = sizeof(DOT::X) == 4 ? columns : p.x.padded;                                             \
        __m512 sums[N][R];                                                                                             \
        for (auto& row : sums)                                                                                         \
            for (auto& sum : row) sum = _mm512_setzero_ps();                                                           \
        int64_t k = 0;                                                                                                 \
        for (; k + DOT::STEP <= columns; k += DOT::STEP)                                                               \
            for (int i = 0; i < N; i++) {                                                                              \
                const __m512i line = _mm512_loadu_si512(w + i * bytes + k * sizeof(DOT::X));                           \
                for (int j = 0; j < R; j++)                                                                            \
                    sums[i][j] = DOT::step(sums[i][j], line, x + j * stride + k, DOT::STEP);                           \
            }                                                                                                          \
        for (; k < columns; k += DOT::STEP)                                                                            \
            for (int i = 0; i < N; i++) {                                                                              \
                const __m512i line = DOT::load(w + i * bytes, k, columns - k);                                         \
                for (int j = 0; j < R; j++)                                                                            \
                    sums[i][j] = DOT::step(sums[i][j], line, x + j * stride + k, columns - k);                         \
            }                                                                                                          \
        for (int i = 0; i < N; i++)                                                                                    \
            for (int j = 0; j < R; j++) p.sums[r + j][n + i] = _mm512_reduce_add_ps(sums[i][j]);                       \
    }                                                                                                                  \
    template <int N> TARGET static DS_INLINE void NAME##_outputs(const Part& p, int64_t n) {                           \
        int64_t r = 0;                                                                                                 \
        if (p.row == 0) {                                                                                              \
            r = p.rows >= 4 ? 4 : 1;                                                                                   \
            for (int i = 0; i < N; i++)                                                                                \
                if (r == 4) NAME##_tile<1, 4>(p, n + i, 0);                                                            \
                else NAME##_tile<1, 1>(p, n + i, 0);                                                                   \
        }                                                                                                              \
        for (; r + 4 <= p.rows; r += 4) NAME##_tile<N, 4>(p, n, r);                                                    \
        for (; r < p.rows; r++) NAME##_tile<N, 1>(p, n, r);                                                            \
    }                                                                                                                  \
    TARGET static void NAME(const Part& p) {                                                                           \
        int64_t n = 0;                                                                                                 \
        for (; n + 4 <= p.outputs; n += 4) NAME##_outputs<4>(p, n);                                                    \
        for (; n < p.outputs; n++) NAME##_outputs<1>(p, n);                                                            \
    }

DS_FLOATING(whole, DS_AVX512, Whole)
DS_FLOATING(half_widened, DS_AVX512, HalfWidened)
DS_FLOATING(half_pairs, DS_BF16, HalfPairs)

// 32 integers as 16-bit ones, in the order of the columns.
template <Form form> DS_AVX512 static DS_INLINE __m512i integers(const uint8_t* row, int64_t k) {
    if constexpr (form == SIGNED8)
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k)));
    if constexpr (form == UNSIGNED8)
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k)));
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k / 2)));
    const __m512i odd = _mm512_slli_epi32(_mm512_and_si512(pairs, _mm512_set1_epi32(0xf0)), 12);
    return _mm512_or_si512(_mm512_and_si512(pairs, _mm512_set1_epi32(15)), odd);
}

// Adds products of neighbours: one instruction where AVX512_VNNI is, which comes with AVX512_BF16.
template <bool VNNI> DS_AVX512 static DS_INLINE __m512i add_products(__m512i sum, __m512i line, __m512i x) {
    if constexpr (VNNI) asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(line), "v"(x));
    else sum = _mm512_add_epi32(sum, _mm512_madd_epi16(line, x));
    return sum;
}

template <Form form, bool VNNI, int N, int R>
DS_AVX512 static DS_INLINE void integer_tile(const Part& p, int64_t n, int64_t r) {
    const Matrix& m = p.matrix;
    const int64_t bytes = row_bytes(m), groups = m.inputs / m.group, span = std::min(FLUSH, m.group);
    const auto* w = static_cast<const uint8_t*>(m.weights) + (p.output + n) * bytes;
    const auto* x = reinterpret_cast<const int16_t*>(p.x.values.data()) + (p.row + r) * p.x.padded;
    const float* scale = m.scale + (p.output + n) * groups;
    constexpr int CHAINS = N * R == 1 ? 4 : 1;  // one alone would wait for itself
    __m512 sums[N][R];
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < m.inputs;) {
        __m512i whole[N][R][CHAINS];
        for (auto& row : whole)
            for (auto& chains : row)
                for (auto& sum : chains) sum = _mm512_setzero_si512();
        const int64_t group = k / m.group, end = std::min(k + span, (group + 1) * m.group);
        while (k < end)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS && k < end; chain++, k += LANES)
                for (int i = 0; i < N; i++) {
                    const __m512i line = integers<form>(w + i * bytes, k);
                    for (int j = 0; j < R; j++)
                        whole[i][j][chain] = add_products<VNNI>(whole[i][j][chain], line,
                                                                _mm512_loadu_si512(x + j * p.x.padded + k));
                }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < R; j++)
                for (int chain = 1; chain < CHAINS; chain++)
                    whole[i][j][0] = _mm512_add_epi32(whole[i][j][0], whole[i][j][chain]);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < R; j++)
                sums[i][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[i][j][0]),
                                             _mm512_set1_ps(scale[i * groups + group]), sums[i][j]);
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < R; j++)
            p.sums[r + j][n + i] = finish(p, p.output + n + i, p.row + r + j, _mm512_reduce_add_ps(sums[i][j]));
}

template <Form form, bool VNNI, int N> DS_AVX512 static DS_INLINE void integer_outputs(const Part& p, int64_t n) {
    int64_t r = 0;
    if (p.row == 0) {
        r = p.rows >= 4 ? 4 : 1;
        for (int i = 0; i < N; i++)
            if (r == 4) integer_tile<form, VNNI, 1, 4>(p, n + i, 0);
            else integer_tile<form, VNNI, 1, 1>(p, n + i, 0);
    }
    for (; r + 4 <= p.rows; r += 4) integer_tile<form, VNNI, N, 4>(p, n, r);
    for (; r < p.rows; r++) integer_tile<form, VNNI, N, 1>(p, n, r);
}

template <Form form, bool VNNI> DS_AVX512 static void integer_vectors(const Part& p) {
    int64_t n = 0;
    for (; n + 4 <= p.outputs; n += 4) integer_outputs<form, VNNI, 4>(p, n);
    for (; n < p.outputs; n++) integer_outputs<form, VNNI, 1>(p, n);
}

// -- tiles ------------------------------------------------------------------------------------------------------------

// The matrix is the left operand as it lies there; tiles of sums have outputs outside, rows inside.
template <int A, int B>
DS_AMX static DS_INLINE void tile_sums(const uint16_t* w, const char* x, const Part& p, int64_t columns, float* sums) {
    const int64_t bytes = 2 * p.matrix.inputs, block = columns * bytes, chunk = 64 * columns;
    // The next outputs are fetched meanwhile, a part of them with each block of rows.
    const int64_t lines = 16 * A * bytes / 64, part = (lines + p.blocks - 1) / p.blocks;
    const int per = static_cast<int>((part * LANES + p.matrix.inputs - 1) / p.matrix.inputs);
    const char* next = reinterpret_cast<const char*>(w) + 16 * A * bytes + 64 * part * p.block;
    _tile_zero(0);
    if (A > 1) _tile_zero(1);
    if (B > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
    for (int64_t k = 0; k < p.matrix.inputs; k += LANES, x += chunk) {
        for (int i = 0; i < per; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        _tile_loadd(4, w + k, bytes);
        if (A > 1) _tile_loadd(5, w + k + 16 * p.matrix.inputs, bytes);
        _tile_loadd(6, x, 4 * columns);
        if (B > 1) _tile_loadd(7, x + block, 4 * columns);
        _tile_dpbf16ps(0, 4, 6);
        if (A > 1) _tile_dpbf16ps(1, 5, 6);
        if (B > 1) _tile_dpbf16ps(2, 4, 7);
        if (A > 1 && B > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * columns);
    if (A > 1) _tile_stored(1, sums + 256, 4 * columns);
    if (B > 1) _tile_stored(2, sums + 512, 4 * columns);
    if (A > 1 && B > 1) _tile_stored(3, sums + 768, 4 * columns);
    DS_FENCE;
}

DS_AMX static void tiles(const Part& p) {
    const int64_t columns = std::min<int64_t>(16, p.x.rows), inputs = p.matrix.inputs;
    const auto* w = static_cast<const uint16_t*>(p.matrix.weights) + p.output * inputs;
    const char* x = p.x.values.data() + 2 * p.row * inputs;
    alignas(64) float sums[1024];
    std::vector<uint16_t> last;
    const bool ragged = p.outputs % 16;
    if (ragged) {  // tiles read sixteen outputs
        last.assign(static_cast<size_t>(PANEL * inputs), 0);
        std::copy(w, w + p.outputs * inputs, last.begin());
        w = last.data();
    }
    DS_FENCE;
    const bool wide = p.outputs > 16, tall = p.rows > 16;
    if (wide && tall) tile_sums<2, 2>(w, x, p, columns, sums);
    else if (wide) tile_sums<2, 1>(w, x, p, columns, sums);
    else if (tall) tile_sums<1, 2>(w, x, p, columns, sums);
    else tile_sums<1, 1>(w, x, p, columns, sums);
    for (int b = 0; b <= tall; b++)
        for (int a = 0; a <= wide; a++) {
            const float* tile = sums + 256 * a + 512 * b;
            if (columns == 16)
                transpose16(tile, 16, &p.sums[16 * b][16 * a], PANEL);
            else
                for (int64_t r = 0; r < columns; r++)
                    for (int n = 0; n < 16; n++) p.sums[r][16 * a + n] = tile[n * columns + r];
        }
}

DS_AMX static void end_tiles() { _tile_release(); }
DS_AMX static void begin_tiles(int64_t rows) { configure_tiles(16, static_cast<int>(std::min<int64_t>(16, rows))); }
#endif

// -- the product ------------------------------------------------------------------------------------------------------

using Kernel = void (*)(const Part&);

static Kernel kernel_of(const Matrix& matrix, const Input& x) {
    const InstructionSet set = instruction_set();
#if defined(__x86_64__)
    if (x.tiled) return tiles;
    if (set >= AVX512) switch (matrix.form) {
        case WHOLE: return whole;
        case HALF: return set >= AVX512_BF16 ? half_pairs : half_widened;
        case SIGNED8: return set >= AVX512_BF16 ? integer_vectors<SIGNED8, true> : integer_vectors<SIGNED8, false>;
        case UNSIGNED8: return set >= AVX512_BF16 ? integer_vectors<UNSIGNED8, true> : integer_vectors<UNSIGNED8, false>;
        case UNSIGNED4: return set >= AVX512_BF16 ? integer_vectors<UNSIGNED4, true> : integer_vectors<UNSIGNED4, false>;
        }
#endif
    return set == AVX2 ? avx2 : portable;
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

void multiply(const Matrix& matrix, const Input& x, float* y, int64_t stride, bool add, int threads) {
    if (!x.rows) return;
    const Kernel kernel = kernel_of(matrix, x);
    using Write = void (*)(const Part&, float*, int64_t, bool);
    const Write write = Versions<Write>{portable_write, avx2_write, avx512_write}.pick();
    const int64_t panels = (matrix.outputs + PANEL - 1) / PANEL;
    // So many rows stay in a cache while the matrix goes by.
    const int64_t chunk = std::max(BLOCK, ROWS_BYTES / std::max<int64_t>(1, 2 * x.padded) / BLOCK * BLOCK);
    const int useful = static_cast<int>(std::clamp<int64_t>(matrix.outputs * matrix.inputs / PER_THREAD, 1, threads));
#pragma omp parallel num_threads(useful) if (useful > 1)
    {
#if defined(__x86_64__)
        if (x.tiled) begin_tiles(x.rows);
#endif
        for (int64_t first = 0; first < x.rows; first += chunk) {
            const int64_t end = std::min(first + chunk, x.rows), blocks = (end - first + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < panels; panel++) {
                alignas(64) float sums[BLOCK][PANEL];
                const int64_t output = panel * PANEL, outputs = std::min(PANEL, matrix.outputs - output);
                for (int64_t row = first; row < end; row += BLOCK) {
                    const int64_t rows = std::min(BLOCK, x.rows - row);
                    const Part part{matrix, x, output, outputs, row, rows, sums, (row - first) / BLOCK, blocks};
                    kernel(part);
                    write(part, y, stride, add);
                }
            }
        }
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
