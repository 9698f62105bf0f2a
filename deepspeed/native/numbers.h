// Element types of tensors, their conversions from and to fp32, and the instruction sets of the kernels.
#pragma once

#include <cstdint>
#include <cstring>

#define DS_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define DS_AVX512 __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,prfchw")))
#define DS_AVX2 __attribute__((target("fma,avx2")))
#else
#define DS_AVX512
#define DS_AVX2
#endif

namespace ds {

// In the order of KINDS and INSTRUCTION_SETS in __init__.py.
enum Kind : int32_t { FP32, BF16, FP16 };
enum InstructionSet : int32_t { PORTABLE, AVX2, AVX512, AVX512_VNNI, AVX512_BF16, AMX };

InstructionSet instruction_set();

// Kernel compiled three times; `pick` returns the version for this processor. All versions compute the same bits.
template <class Function> struct Versions {
    Function portable, avx2, avx512;
    Function pick() const {
        const InstructionSet set = instruction_set();
        return set >= AVX512 ? avx512 : set == AVX2 ? avx2 : portable;
    }
};

DS_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

DS_INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

DS_INLINE float from_bf16(uint16_t half) { return as_float(static_cast<uint32_t>(half) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
DS_INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Rescale the exponent by a multiplication, which also converts subnormal halves to normal floats.
DS_INLINE float from_fp16(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const uint32_t moved = as_bits(as_float(magnitude) * 0x1p112f);
    const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : moved;
    return as_float(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

// Round to nearest, ties to even, by adding a float whose last bit has the weight of the half's last bit.
DS_INLINE uint16_t to_fp16(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const float clipped = as_float(magnitude) * 0x1p112f * 0x1p-110f;  // beyond the largest half: infinity
    const uint32_t exponent = magnitude & 0x7f800000u;
    const uint32_t floor = exponent < 0x38800000u ? 0x38800000u : exponent;
    const uint32_t sum = as_bits(clipped + as_float(floor + 0x07800000u));
    const uint32_t rounded = ((sum >> 13) & 0x7c00u) + (sum & 0xfffu);
    return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (magnitude > 0x7f800000u ? 0x7e00u : rounded));
}

DS_INLINE int64_t width(Kind kind) { return kind == FP32 ? 4 : 2; }

DS_INLINE void widen(const uint16_t* from, Kind kind, float* to, int64_t count) {
    if (kind == BF16) {
        for (int64_t i = 0; i < count; i++) to[i] = from_bf16(from[i]);
    } else {
        for (int64_t i = 0; i < count; i++) to[i] = from_fp16(from[i]);
    }
}

DS_INLINE void narrow(const float* from, Kind kind, uint16_t* to, int64_t count) {
    if (kind == BF16) {
        for (int64_t i = 0; i < count; i++) to[i] = to_bf16(from[i]);
    } else {
        for (int64_t i = 0; i < count; i++) to[i] = to_fp16(from[i]);
    }
}

}  // namespace ds
