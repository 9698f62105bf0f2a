// Sums in rank order, block by block.
#include <algorithm>

#include "sum.h"

namespace ds {
namespace {

constexpr int64_t BLOCK = 1024;  // elements per block, so that fp32 values and sum stay in the first-level cache

struct Terms {
    const void* const* parts;
    int count;
    Kind kind;
    void* out;
    Kind out_kind;
    float scale;
    bool add;
};

// total = sum + values starting at `at`
DS_INLINE void plus(const float* sum, const void* base, Kind kind, int64_t at, int64_t count, float* total) {
    const auto* whole = static_cast<const float*>(base) + at;
    const auto* half = static_cast<const uint16_t*>(base) + at;
    if (kind == FP32) {
        for (int64_t i = 0; i < count; i++) total[i] = sum[i] + whole[i];
    } else if (kind == BF16) {
        for (int64_t i = 0; i < count; i++) total[i] = sum[i] + from_bf16(half[i]);
    } else {
        for (int64_t i = 0; i < count; i++) total[i] = sum[i] + from_fp16(half[i]);
    }
}

DS_INLINE void sum_range(const Terms& terms, int64_t elements) {
    alignas(64) float total[BLOCK];
    for (int64_t at = 0; at < elements; at += BLOCK) {
        const int64_t count = std::min(BLOCK, elements - at);
        const float* sum = total;
        if (terms.kind == FP32)
            sum = static_cast<const float*>(terms.parts[0]) + at;
        else
            widen(static_cast<const uint16_t*>(terms.parts[0]) + at, terms.kind, total, count);
        for (int part = 1; part < terms.count; part++, sum = total)
            plus(sum, terms.parts[part], terms.kind, at, count, total);
        if (terms.scale != 1.0f) {
            for (int64_t i = 0; i < count; i++) total[i] = sum[i] * terms.scale;
            sum = total;
        }
        if (terms.add) {
            plus(sum, terms.out, terms.out_kind, at, count, total);
            sum = total;
        }
        if (terms.out_kind == FP32)
            std::copy_n(sum, count, static_cast<float*>(terms.out) + at);
        else
            narrow(sum, terms.out_kind, static_cast<uint16_t*>(terms.out) + at, count);
    }
}

void portable(const Terms& terms, int64_t elements) { sum_range(terms, elements); }
DS_AVX2 void avx2(const Terms& terms, int64_t elements) { sum_range(terms, elements); }
DS_AVX512 void avx512(const Terms& terms, int64_t elements) { sum_range(terms, elements); }

DS_INLINE void add_range(const float* a, const float* b, int64_t elements, float* out) {
    for (int64_t i = 0; i < elements; i++) out[i] = a[i] + b[i];
}

void portable_two(const float* a, const float* b, int64_t elements, float* out) { add_range(a, b, elements, out); }
DS_AVX2 void avx2_two(const float* a, const float* b, int64_t elements, float* out) { add_range(a, b, elements, out); }
DS_AVX512 void avx512_two(const float* a, const float* b, int64_t elements, float* out) {
    add_range(a, b, elements, out);
}

}  // namespace

void sum(const void* const* parts, int count, uint64_t n, Kind kind, void* out, Kind out_kind, float scale, bool add) {
    const auto elements = static_cast<int64_t>(n);
    if (count == 2 && kind == FP32 && out_kind == FP32 && scale == 1.0f && !add) {  // two ranks need a single pass
        using Function = void (*)(const float*, const float*, int64_t, float*);
        const Function two = Versions<Function>{portable_two, avx2_two, avx512_two}.pick();
        two(static_cast<const float*>(parts[0]), static_cast<const float*>(parts[1]), elements,
            static_cast<float*>(out));
        return;
    }
    using Function = void (*)(const Terms&, int64_t);
    const Function range = Versions<Function>{portable, avx2, avx512}.pick();
    range(Terms{parts, count, kind, out, out_kind, scale, add}, elements);
}

}  // namespace ds
