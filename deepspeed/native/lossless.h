// Lossless bf16 matrices in 12 bits: a byte with sign and mantissa, and a 4-bit code for one of sixteen exponents.
// Elements with other exponents (escapes) are stored in a separate list.
#pragma once

#include "products.h"
#include "tiles.h"

namespace ds {

constexpr int64_t GROUP = 4;                 // outputs with interleaved blocks: one memory stream, four sums
constexpr int64_t BLOCK = 64;                // columns
constexpr int64_t PIECE = 96;                // bytes of an output's block
constexpr int64_t STRIDE = GROUP * PIECE;    // bytes of a block of four outputs
constexpr int64_t LOSSLESS_FAR = 8192;       // prefetch distance in bytes

// The escapes of four outputs, by column.
struct Escapes {
    const int32_t *next, *end;
    const uint16_t* value;
    Escapes(const Matrix& m, int64_t output)
        : next(m.places + m.starts[output / GROUP]), end(m.places + m.starts[output / GROUP + 1]),
          value(m.values + m.starts[output / GROUP]) {}
    // The block of the next escape; `columns` if there is none before it.
    DS_INLINE int64_t block(int64_t columns) const { return next < end ? *next / (GROUP * BLOCK) * BLOCK : columns; }
    // Calls put(index in the four outputs, column, bits) for the escapes before a column.
    template <class Put> DS_INLINE void take(int64_t column, Put put) {
        for (; next < end && *next < GROUP * column; next++, value++) put(*next % GROUP, *next / GROUP, *value);
    }
};

#if defined(__x86_64__)
// Decodes 64 columns into two lines of 32.
struct Decoder {
    __m512i table;
    DS_AVX512 static DS_INLINE Decoder of(const Matrix& m) { return {_mm512_loadu_si512(m.exponents)}; }
    DS_AVX512 DS_INLINE __m512i line(const uint8_t* at, __m512i codes) const {
        const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        const __m512i keep = _mm512_set1_epi16(static_cast<int16_t>(0x807f));
        return _mm512_ternarylogic_epi32(x, keep, _mm512_permutexvar_epi16(codes, table), 0xea);  // (x & keep) | …
    }
    DS_AVX512 DS_INLINE void operator()(const uint8_t* piece, __m512i& low, __m512i& high) const {
        const __m512i codes =
            _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece + BLOCK)));
        low = line(piece, codes);
        high = line(piece + 32, _mm512_srli_epi16(codes, 4));
    }
};

// Decode a block of four outputs, escapes included.
DS_AVX512 static DS_INLINE void decode_block(const Decoder& decode, const uint8_t* w, int64_t k, Escapes& escapes,
                                             uint16_t (*out)[BLOCK]) {
    for (int i = 0; i < GROUP; i++) {
        __m512i low, high;
        decode(w + i * PIECE, low, high);
        _mm512_store_si512(out[i], low);
        _mm512_store_si512(out[i] + 32, high);
    }
    escapes.take(k + BLOCK, [&](int64_t i, int64_t column, uint16_t bits) { out[i][column - k] = bits; });
}
#endif

// Unpack outputs [output, output + outputs) to bf16 [outputs, inputs].
void unpack(const Matrix& matrix, int64_t output, int64_t outputs, uint16_t* out);

}  // namespace ds
