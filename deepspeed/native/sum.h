// Sums of several contributions in rank order, each term and the sum in fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DS_CLONES
#endif

namespace ds {

enum { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

inline uint64_t width_of(int dtype) { return dtype == kFp32 ? 4 : 2; }

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct Bf16 {
  using stored = uint16_t;
  static inline float load(stored x) { return from_bits(static_cast<uint32_t>(x) << 16); }
  static inline stored store(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;  // a NaN must not round to infinity
    return static_cast<stored>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
  }
};

struct Fp32 {
  using stored = float;
  static inline float load(stored x) { return x; }
  static inline stored store(float value) { return value; }
};

struct Fp16 {
  using stored = uint16_t;
  static inline float load(stored x) { return from_fp16(x); }
  static inline stored store(float value) { return to_fp16(value); }
};

void sum(const void* const* parts, int count, uint64_t n, int dtype, void* out, int out_dtype, float scale, bool add);

}  // namespace ds
