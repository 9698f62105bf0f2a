// Common code of AVX-512 and AMX kernels: transposition, and the configuration of matrix tiles.
#pragma once

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header (its bug 105593)
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

#define DS_BF16 __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prfchw")))
#define DS_AMX \
    __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prfchw,amx-tile,amx-bf16,amx-int8")))
// Tile instructions access memory without the compiler's knowledge.
#define DS_FENCE asm volatile("" ::: "memory")

namespace ds {

// Transpose 16 × 16 elements of 32 bits, in place.
DS_AVX512 DS_INLINE void transpose16(__m512i (&a)[16]) {
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        b[j] = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88);
        b[j + 4] = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd);
        b[j + 8] = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88);
        b[j + 12] = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        a[j] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88);
        a[j + 8] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd);
        a[j + 4] = _mm512_shuffle_i32x4(b[j + 4], b[j + 12], 0x88);
        a[j + 12] = _mm512_shuffle_i32x4(b[j + 4], b[j + 12], 0xdd);
    }
}

// Transpose from memory to memory; `from` and `to` are row strides in elements.
DS_AVX512 inline void transpose16(const void* source, int64_t from, void* target, int64_t to) {
    const auto* in = static_cast<const int32_t*>(source);
    auto* out = static_cast<int32_t*>(target);
    __m512i a[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(in + i * from);
    transpose16(a);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * to, a[i]);
}

// Convert up to sixteen rows of fp32 [rows, width] to pairs of bf16 [width / 2, made], the right operand of tiles;
// missing rows are zero.
DS_BF16 inline void to_pairs(const float* x, uint32_t* out, int64_t rows, int64_t made, int64_t width) {
    for (int64_t k = 0; k < width; k += 32) {
        __m512i pairs[16];
        for (int64_t r = 0; r < 16; r++)
            pairs[r] = r < rows ? (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + r * width + k + 16),
                                                               _mm512_loadu_ps(x + r * width + k))
                                : _mm512_setzero_si512();
        if (made == 1) {
            _mm512_storeu_si512(out + k / 2, pairs[0]);
            continue;
        }
        transpose16(pairs);
        const __mmask16 there = static_cast<__mmask16>((1 << made) - 1);
        for (int64_t p = 0; p < 16; p++) _mm512_mask_storeu_epi32(out + (k / 2 + p) * made, there, pairs[p]);
    }
}

// Tiles 0 to 3: fp32 sums [rows, columns]; 4 and 5: bf16 [rows, 32]; 6 and 7: bf16 pairs [16, columns].
DS_AMX inline void configure_tiles(int rows, int columns) {
    alignas(64) uint8_t config[64] = {1};
    auto* bytes = reinterpret_cast<uint16_t*>(config + 16);
    for (int tile = 0; tile < 8; tile++) {
        bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 64 : 4 * columns);
        config[48 + tile] = static_cast<uint8_t>(tile < 6 ? rows : 16);
    }
    DS_FENCE;
    _tile_loadconfig(config);
}

}  // namespace ds
#endif
