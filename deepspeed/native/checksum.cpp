// CRC-32 of zlib, 128 bytes at a time by carry-less multiplication ("Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel 2009).
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds {

constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // bit-reversed, like all following values

struct Table {
    uint32_t of[256] = {};
    constexpr Table() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t rest = byte;
            for (int bit = 0; bit < 8; bit++) rest = (rest >> 1) ^ (rest & 1 ? POLYNOMIAL : 0);
            of[byte] = rest;
        }
    }
};
constexpr Table TABLE;

static uint32_t bytewise(uint32_t crc, const uint8_t* data, size_t count) {
    for (size_t i = 0; i < count; i++) crc = (crc >> 8) ^ TABLE.of[(crc ^ data[i]) & 0xFF];
    return crc;
}

#if defined(__x86_64__)

// x^power modulo the polynomial, shifted by one bit, because the product of two reversed factors is one bit short.
constexpr int64_t factor(int power) {
    uint32_t rest = 0x80000000;
    for (int i = 0; i < power; i++) rest = (rest >> 1) ^ (rest & 1 ? POLYNOMIAL : 0);
    return static_cast<int64_t>(rest) << 1;
}

#define DS_CLMUL __attribute__((target("avx2,pclmul,vpclmulqdq")))

// Fold `part` forward onto `next`, which is later in the data.
DS_CLMUL static inline __m128i fold(__m128i part, __m128i next, __m128i factors) {
    const __m128i low = _mm_clmulepi64_si128(part, factors, 0x00), high = _mm_clmulepi64_si128(part, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

DS_CLMUL static inline __m256i fold(__m256i part, __m256i next, __m256i factors) {
    const __m256i low = _mm256_clmulepi64_epi128(part, factors, 0x00),
                  high = _mm256_clmulepi64_epi128(part, factors, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

constexpr int STREAMS = 4;  // number of independent multiplications in flight
constexpr size_t STEP = STREAMS * sizeof(__m256i);

// For at least STEP bytes, a multiple of 16; the state is the same as in `bytewise`.
DS_CLMUL static uint32_t folded(uint32_t crc, const uint8_t* data, size_t count) {
    constexpr int FAR = 8 * STEP;
    constexpr int64_t far_low = factor(FAR + 32), far_high = factor(FAR - 32);
    constexpr int64_t near_low = factor(128 + 32), near_high = factor(128 - 32);
    const __m256i far = _mm256_set_epi64x(far_high, far_low, far_high, far_low);
    const __m128i near = _mm_set_epi64x(near_high, near_low);
    const uint8_t* const end = data + count;
    __m256i parts[STREAMS];
    for (int i = 0; i < STREAMS; i++) parts[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + i);
    parts[0] = _mm256_xor_si256(parts[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, static_cast<int>(crc)));
    for (data += STEP; end - data >= static_cast<ptrdiff_t>(STEP); data += STEP)
        for (int i = 0; i < STREAMS; i++)
            parts[i] = fold(parts[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + i), far);
    __m128i one = _mm_setzero_si128();
    for (const __m256i& part : parts) {
        one = fold(one, _mm256_castsi256_si128(part), near);
        one = fold(one, _mm256_extracti128_si256(part, 1), near);
    }
    for (; data < end; data += 16) one = fold(one, _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)), near);
    uint8_t rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), one);
    return bytewise(0, rest, 16);
}

static bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq"); }

#else

constexpr size_t STEP = 1;
static uint32_t folded(uint32_t crc, const uint8_t* data, size_t count) { return bytewise(crc, data, count); }
static bool supported() { return false; }

#endif

}  // namespace ds

extern "C" {

// Whether `ds_crc32` is faster than zlib here: on x86 processors of 2020 and later.
int32_t ds_crc32_is_fast() { return ds::supported(); }

uint32_t ds_crc32(const uint8_t* data, uint64_t count) {
    const size_t many = ds::supported() && count >= ds::STEP ? count / 16 * 16 : 0;
    const uint32_t crc = many ? ds::folded(~0u, data, many) : ~0u;
    return ~ds::bytewise(crc, data + many, count - many);
}

}
