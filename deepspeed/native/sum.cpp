// Sums in rank order; `out` may be one of the contributions.
#include "sum.h"

namespace {

constexpr uint64_t kBlock = 2048;  // elements whose fp32 sum stays in the first-level cache

using ds::Bf16;
using ds::Fp16;
using ds::Fp32;

#define DS_ONE_TYPE(Type)                                                                              \
  DS_CLONES void first_##Type(const void* part, uint64_t at, uint64_t n, float* total) {               \
    const auto* x = static_cast<const Type::stored*>(part) + at;                                       \
    for (uint64_t i = 0; i < n; ++i) total[i] = Type::load(x[i]);                                      \
  }                                                                                                    \
  DS_CLONES void next_##Type(const void* part, uint64_t at, uint64_t n, float* total) {                \
    const auto* x = static_cast<const Type::stored*>(part) + at;                                       \
    for (uint64_t i = 0; i < n; ++i) total[i] += Type::load(x[i]);                                     \
  }                                                                                                    \
  DS_CLONES void last_##Type(const float* total, uint64_t at, uint64_t n, float scale, void* out, bool add) { \
    auto* y = static_cast<Type::stored*>(out) + at;                                                    \
    if (add) {                                                                                         \
      for (uint64_t i = 0; i < n; ++i) y[i] = Type::store(total[i] * scale + Type::load(y[i]));        \
    } else {                                                                                           \
      for (uint64_t i = 0; i < n; ++i) y[i] = Type::store(total[i] * scale);                           \
    }                                                                                                  \
  }

DS_ONE_TYPE(Fp32)
DS_ONE_TYPE(Bf16)
DS_ONE_TYPE(Fp16)

// Two fp32 contributions, the case of two ranks: one pass.
DS_CLONES void two_fp32(const float* a, const float* b, uint64_t n, float* out) {
  for (uint64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

using Load = void (*)(const void*, uint64_t, uint64_t, float*);
using Store = void (*)(const float*, uint64_t, uint64_t, float, void*, bool);

}  // namespace

namespace ds {

void sum(const void* const* parts, int count, uint64_t n, int dtype, void* out, int out_dtype, float scale, bool add) {
  if (count == 2 && dtype == kFp32 && out_dtype == kFp32 && scale == 1.0f && !add) {
    two_fp32(static_cast<const float*>(parts[0]), static_cast<const float*>(parts[1]), n, static_cast<float*>(out));
    return;
  }
  const Load firsts[] = {first_Fp32, first_Bf16, first_Fp16};
  const Load nexts[] = {next_Fp32, next_Bf16, next_Fp16};
  const Store lasts[] = {last_Fp32, last_Bf16, last_Fp16};
  alignas(64) float total[kBlock];
  for (uint64_t at = 0; at < n; at += kBlock) {
    const uint64_t here = n - at < kBlock ? n - at : kBlock;
    firsts[dtype](parts[0], at, here, total);
    for (int p = 1; p < count; ++p) nexts[dtype](parts[p], at, here, total);
    lasts[out_dtype](total, at, here, scale, out, add);
  }
}

}  // namespace ds
