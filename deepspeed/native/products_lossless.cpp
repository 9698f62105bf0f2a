// Packing and unpacking of bf16 matrices in 12 bits.
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
// Decode 32 columns: their bytes of sign and mantissa, and their codes.
DS_AVX2 static DS_INLINE void avx2_line(__m256i bytes, __m256i codes, __m256i lows, __m256i highs, uint16_t* out) {
    const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
    const __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, bytes), _mm256_shuffle_epi8(lows, codes));
    const __m256i high = _mm256_or_si256(_mm256_and_si256(sign, bytes), _mm256_shuffle_epi8(highs, codes));
    const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    auto* to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(first, second, 0x31));
}

DS_AVX2 static void avx2_rows(const Matrix& m, int64_t output, int64_t outputs, uint16_t* out) {
    alignas(32) uint8_t tables[2][32];  // low and high bytes of the exponents, by code, once for each half of a vector
    for (int i = 0; i < 32; i++) {
        tables[0][i] = static_cast<uint8_t>(m.exponents[i % 16]);
        tables[1][i] = static_cast<uint8_t>(m.exponents[i % 16] >> 8);
    }
    const __m256i lows = _mm256_load_si256(reinterpret_cast<const __m256i*>(tables[0]));
    const __m256i highs = _mm256_load_si256(reinterpret_cast<const __m256i*>(tables[1]));
    const __m256i four = _mm256_set1_epi8(15);
    const uint8_t* piece = piece_of(m, output);
    for (int64_t k = 0; k < m.inputs; k += BLOCK, piece += STRIDE) {
        if (outputs == GROUP)
            for (int64_t i = 0; i < STRIDE; i += 64) __builtin_prefetch(piece + LOSSLESS_FAR + i, 0, 2);
        for (int64_t i = 0; i < outputs; i++) {
            const auto* at = reinterpret_cast<const __m256i*>(piece + i * PIECE);
            const __m256i codes = _mm256_loadu_si256(at + 2);
            uint16_t* to = out + i * m.inputs + k;
            avx2_line(_mm256_loadu_si256(at), _mm256_and_si256(codes, four), lows, highs, to);
            avx2_line(_mm256_loadu_si256(at + 1), _mm256_and_si256(_mm256_srli_epi16(codes, 4), four), lows, highs,
                      to + 32);
        }
    }
}

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
    const Function rows = Versions<Function>{portable_rows, avx2_rows, avx512_rows}.pick();
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

// Pack a block of an output; `rare` marks the columns with none of the sixteen exponents, which are ascending.
DS_INLINE uint16_t pack_piece(const uint16_t* from, const uint16_t* exponents, uint8_t* piece, uint16_t* rare) {
    uint16_t codes[BLOCK] = {}, any = 0;
    for (int64_t j = 0; j < BLOCK; j++) {
        piece[j] = static_cast<uint8_t>((from[j] >> 8 & 0x80) | (from[j] & 0x7f));
        rare[j] = 1;
    }
    for (int i = 0; i < 16; i++)
        for (int64_t j = 0; j < BLOCK; j++) {
            const uint16_t exponent = from[j] & 0x7f80;
            codes[j] = static_cast<uint16_t>(codes[j] + (exponent > exponents[i]));
            rare[j] = static_cast<uint16_t>(rare[j] & (exponent != exponents[i]));
        }
    for (int64_t j = 0; j < 32; j++)
        piece[BLOCK + j] = static_cast<uint8_t>((codes[j] & 15) | (codes[j + 32] & 15) << 4);
    for (int64_t j = 0; j < BLOCK; j++) any |= rare[j];
    return any;
}

using PackPiece = uint16_t (*)(const uint16_t*, const uint16_t*, uint8_t*, uint16_t*);
static uint16_t portable_piece(const uint16_t* from, const uint16_t* exponents, uint8_t* piece, uint16_t* rare) {
    return pack_piece(from, exponents, piece, rare);
}
DS_AVX2 static uint16_t avx2_piece(const uint16_t* from, const uint16_t* exponents, uint8_t* piece, uint16_t* rare) {
    return pack_piece(from, exponents, piece, rare);
}
DS_AVX512 static uint16_t avx512_piece(const uint16_t* from, const uint16_t* exponents, uint8_t* piece, uint16_t* rare) {
    return pack_piece(from, exponents, piece, rare);
}

}  // namespace ds

extern "C" {

// counts[256]: histogram of the exponents of `count` bf16 elements.
void ds_exponents(const uint16_t* weights, int64_t count, int64_t* counts) {
    int64_t found[4][256] = {};  // four histograms: equal neighbours would wait for each other
    for (int64_t i = 0; i < count; i++) found[i % 4][weights[i] >> 7 & 255]++;
    for (int i = 0; i < 256; i++) counts[i] = found[0][i] + found[1][i] + found[2][i] + found[3][i];
}

// Pack [outputs, inputs], with ascending exponents [32], into the zeroed `out`, and store up to `most` escapes. Returns
// the number of escapes.
int64_t ds_pack(const uint16_t* weights, int64_t outputs, int64_t inputs, const uint16_t* exponents, uint8_t* out,
                int32_t* starts, int32_t* places, uint16_t* values, int64_t most) {
    using namespace ds;
    const PackPiece pack = Versions<PackPiece>{portable_piece, avx2_piece, avx512_piece}.pick();
    int64_t found = 0;
    starts[0] = 0;
    for (int64_t first = 0; first < outputs; first += GROUP) {
        const int64_t there = std::min(GROUP, outputs - first);
        for (int64_t k = 0; k < inputs; k += BLOCK, out += STRIDE) {
            uint16_t rare[GROUP][BLOCK] = {}, any = 0;
            for (int64_t i = 0; i < there; i++)
                any |= pack(weights + (first + i) * inputs + k, exponents, out + i * PIECE, rare[i]);
            if (!any) continue;
            for (int64_t j = 0; j < BLOCK; j++)
                for (int64_t i = 0; i < there; i++)
                    if (rare[i][j] && found++ < most) {
                        places[found - 1] = static_cast<int32_t>((k + j) * GROUP + i);
                        values[found - 1] = weights[(first + i) * inputs + k + j];
                    }
        }
        starts[first / GROUP + 1] = static_cast<int32_t>(found);
    }
    return found;
}

// out[count, inputs] in bf16: rows of a matrix with these parts.
void ds_unpack(const void* codes, const uint16_t* exponents, const int32_t* starts, const int32_t* places,
               const uint16_t* values, int64_t inputs, const int64_t* rows, int64_t count, uint16_t* out, int threads) {
    ds::Matrix matrix{};
    matrix.weights = codes, matrix.exponents = exponents, matrix.starts = starts;
    matrix.places = places, matrix.values = values, matrix.inputs = inputs, matrix.form = ds::LOSSLESS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) ds::unpack(matrix, rows[i], 1, out + i * inputs);
}
}
