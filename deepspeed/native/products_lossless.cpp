// Matrices of bf16 in 12 bits: packed, and unpacked for what reads them whole.
#include "lossless.h"

#include <algorithm>

#include "numbers.h"

namespace ds {

static const uint8_t* piece_of(const Matrix& m, int64_t output) {
    const auto* bytes = static_cast<const uint8_t*>(m.weights);
    return bytes + output / GROUP * (m.inputs / BLOCK) * STRIDE + output % GROUP * PIECE;
}

static void portable_rows(const Matrix& m, int64_t output, int64_t outputs, uint16_t* out) {
    const uint8_t* piece = piece_of(m, output);
    for (int64_t k = 0; k < m.inputs; k += BLOCK, piece += STRIDE)
        for (int64_t i = 0; i < outputs; i++)
            for (int64_t j = 0; j < BLOCK; j++) {
                const uint8_t* at = piece + i * PIECE;
                const int code = at[BLOCK + j % 32] >> (j / 32 * 4) & 15;
                out[i * m.inputs + k + j] =
                    static_cast<uint16_t>((at[j] & 0x80) << 8 | (at[j] & 0x7f) | m.exponents[code]);
            }
}

#if defined(__x86_64__)
DS_AVX512 static void avx512_rows(const Matrix& m, int64_t output, int64_t outputs, uint16_t* out) {
    const Decoder decode = Decoder::of(m);
    const uint8_t* piece = piece_of(m, output);
    for (int64_t k = 0; k < m.inputs; k += BLOCK, piece += STRIDE) {
        if (outputs == GROUP)
            for (int64_t i = 0; i < STRIDE; i += 64) __builtin_prefetch(piece + LOSSLESS_FAR + i, 0, 2);
        for (int64_t i = 0; i < outputs; i++) {
            __m512i low, high;
            decode(piece + i * PIECE, low, high);
            _mm512_storeu_si512(out + i * m.inputs + k, low);
            _mm512_storeu_si512(out + i * m.inputs + k + 32, high);
        }
    }
}
#endif

void unpack(const Matrix& m, int64_t output, int64_t outputs, uint16_t* out) {
    using Function = void (*)(const Matrix&, int64_t, int64_t, uint16_t*);
#if defined(__x86_64__)
    const Function rows = instruction_set() >= AVX512 ? avx512_rows : portable_rows;
#else
    const Function rows = portable_rows;
#endif
    for (const int64_t end = output + outputs; output < end;) {
        const int64_t first = output % GROUP, count = std::min(GROUP - first, end - output);
        rows(m, output, count, out);
        Escapes(m, output).take(m.inputs, [&](int64_t i, int64_t column, uint16_t bits) {
            if (i >= first && i < first + count) out[(i - first) * m.inputs + column] = bits;
        });
        output += count, out += count * m.inputs;
    }
}

// A matrix to be packed: bf16 [outputs, inputs], and by exponent its code, or one beyond them all.
struct Source {
    const uint16_t* weights;
    const uint8_t* codes;
    int64_t outputs, inputs;
    DS_INLINE bool escapes(int64_t at) const { return codes[weights[at] >> 7 & 255] > 15; }
};

static int32_t escapes_of(const Source& s, int64_t group) {
    int32_t found = 0;
    for (int64_t at = group * GROUP * s.inputs; at < std::min((group + 1) * GROUP, s.outputs) * s.inputs; at++)
        found += s.escapes(at);
    return found;
}

static void pack_group(const Source& s, int64_t group, uint8_t* out, int32_t* places, uint16_t* values) {
    const int64_t outputs = std::min(GROUP, s.outputs - group * GROUP);
    out += group * (s.inputs / BLOCK) * STRIDE;
    for (int64_t k = 0; k < s.inputs; k += BLOCK, out += STRIDE) {
        for (int64_t i = 0; i < outputs; i++) {
            const uint16_t* from = s.weights + (group * GROUP + i) * s.inputs + k;
            uint8_t* piece = out + i * PIECE;
            for (int64_t j = 0; j < BLOCK; j++) piece[j] = static_cast<uint8_t>((from[j] >> 8 & 0x80) | (from[j] & 0x7f));
            for (int64_t j = 0; j < 32; j++)
                piece[BLOCK + j] = static_cast<uint8_t>((s.codes[from[j] >> 7 & 255] & 15) |
                                                        (s.codes[from[j + 32] >> 7 & 255] & 15) << 4);
        }
        for (int64_t j = k; j < k + BLOCK; j++)
            for (int64_t i = 0; i < outputs; i++) {
                const int64_t at = (group * GROUP + i) * s.inputs + j;
                if (!s.escapes(at)) continue;
                *places++ = static_cast<int32_t>(j * GROUP + i);
                *values++ = s.weights[at];
            }
    }
}

}  // namespace ds

extern "C" {

// counts[256]: how many of `count` elements of bf16 have each exponent.
void ds_exponents(const uint16_t* weights, int64_t count, int64_t* counts) {
    int64_t found[4][256] = {};  // neighbours are often equal, and would wait for each other
    for (int64_t i = 0; i < count; i++) found[i % 4][weights[i] >> 7 & 255]++;
    for (int i = 0; i < 256; i++) counts[i] = found[0][i] + found[1][i] + found[2][i] + found[3][i];
}

// Packs [outputs, inputs] with codes[256] (over 15: an escape) into `out` [outputs / 4 rounded up, inputs / 64, 4, 96],
// zeros before, and the escapes, as many as were counted.
void ds_pack(const uint16_t* weights, int64_t outputs, int64_t inputs, const uint8_t* codes, uint8_t* out,
             int32_t* starts, int32_t* places, uint16_t* values, int threads) {
    const ds::Source source{weights, codes, outputs, inputs};
    const int64_t groups = (outputs + ds::GROUP - 1) / ds::GROUP;
    starts[0] = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t group = 0; group < groups; group++) starts[group + 1] = ds::escapes_of(source, group);
    for (int64_t group = 0; group < groups; group++) starts[group + 1] += starts[group];
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t group = 0; group < groups; group++)
        ds::pack_group(source, group, out, places + starts[group], values + starts[group]);
}

// out[count, inputs] of bf16: rows of a matrix of these parts.
void ds_unpack(const void* codes, const uint16_t* exponents, const int32_t* starts, const int32_t* places,
               const uint16_t* values, int64_t inputs, const int64_t* rows, int64_t count, uint16_t* out, int threads) {
    ds::Matrix matrix{};
    matrix.weights = codes, matrix.exponents = exponents, matrix.starts = starts;
    matrix.places = places, matrix.values = values, matrix.inputs = inputs, matrix.form = ds::LOSSLESS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) ds::unpack(matrix, rows[i], 1, out + i * inputs);
}
}
