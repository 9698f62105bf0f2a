// One optimizer step of one tensor in one pass over memory: the gradient is widened and scaled, the parameter and its
// states are updated in fp32, and the new values are rounded into a low-precision copy. Any length, any alignment.
#include <algorithm>
#include <cmath>

#include <omp.h>
#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header (its bug 105593)
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "numbers.h"

namespace ds {

// Mirrored by `_NativeLeaf` in deepspeed/ops/cpu_optimizer.py.
struct Leaf {
    int64_t count;
    void* param;
    const void* gradient;
    void* first;   // state; null where the rule has none
    void* second;  // state; null where the rule has none
    void* out;     // rounded copy of the new values, or null
    Kind param_kind, gradient_kind, first_kind, second_kind, out_kind;
    float factor;  // multiplies the gradient
};

// Elements per block, so that all of its data stays in the first-level cache.
constexpr int64_t BLOCK = 64;
// Prefetch distance in bytes (measured; hardware prefetching stops at each 4 KiB page).
constexpr int64_t AHEAD = 1792;
// Length from which the copy is written past the caches, because it would be evicted before its first use.
constexpr int64_t STREAMED = 1 << 20;
// Number of elements below which a second thread does not pay off.
constexpr int64_t PER_THREAD = 1 << 15;

// Fused multiply-adds wherever torch's kernels use them: Lion's sign can depend on the last bit.
DS_INLINE float lerp(float from, float to, float weight) {
    return weight < 0.5f ? std::fma(weight, to - from, from) : std::fma(weight - 1.0f, to - from, to);
}

// The fields of a rule are the numbers from its optimizer, in this order.
struct Adam {
    float first_weight, second_decay, second_weight, step, eps, kept, l2;
    DS_INLINE void update(float& param, float gradient, float& first, float& second) const {
        gradient = std::fma(l2, param, gradient);
        first = lerp(first, gradient, first_weight);
        second = std::fma(second_weight * gradient, gradient, second * second_decay);
        param = param * kept - step * first / (std::sqrt(second) + eps);
    }
};

struct Adagrad {
    float rate, eps, l2;
    DS_INLINE void update(float& param, float gradient, float& sum, float&) const {
        gradient = std::fma(l2, param, gradient);
        sum = std::fma(gradient, gradient, sum);
        param -= rate * gradient / (std::sqrt(sum) + eps);
    }
};

struct Lion {
    float rate, sign_weight, momentum_weight, kept;
    DS_INLINE void update(float& param, float gradient, float& momentum, float&) const {
        const float direction = lerp(momentum, gradient, sign_weight);
        param = param * kept - rate * static_cast<float>((direction > 0.0f) - (direction < 0.0f));
        momentum = lerp(momentum, gradient, momentum_weight);
    }
};

// Prefetch a later block, for reading or also for writing.
template <bool written> DS_INLINE void fetch(const void* base, Kind kind, int64_t element) {
    const char* start = static_cast<const char*>(base) + element * width(kind) + AHEAD;
    for (int64_t byte = 0; byte < BLOCK * width(kind); byte += 64) __builtin_prefetch(start + byte, written);
}

DS_INLINE void fetch_all(const Leaf& leaf, int64_t element) {
    fetch<true>(leaf.param, leaf.param_kind, element);
    fetch<false>(leaf.gradient, leaf.gradient_kind, element);
    fetch<true>(leaf.first, leaf.first_kind, element);
    if (leaf.second) fetch<true>(leaf.second, leaf.second_kind, element);
}

// The values as fp32: in place, or widened into `scratch`.
DS_INLINE float* as_fp32(const void* base, Kind kind, int64_t start, int64_t count, float* scratch) {
    if (kind == FP32) return static_cast<float*>(const_cast<void*>(base)) + start;
    widen(static_cast<const uint16_t*>(base) + start, kind, scratch, count);
    return scratch;
}

DS_INLINE void round_into(const float* values, void* base, Kind kind, int64_t start, int64_t count) {
    if (kind != FP32) narrow(values, kind, static_cast<uint16_t*>(base) + start, count);
}

DS_INLINE void write_around_caches(const float* values, Kind kind, uint16_t* to) {
#if defined(__x86_64__)
    alignas(64) uint16_t rounded[BLOCK];
    narrow(values, kind, rounded, BLOCK);
    for (int64_t i = 0; i < BLOCK; i += 8)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<__m128i*>(rounded + i)));
#else
    narrow(values, kind, to, BLOCK);
#endif
}

template <class Rule>
DS_INLINE void update_block(const Rule& rule, float factor, float* __restrict param, const float* __restrict gradient,
                            float* __restrict first, float* __restrict second, int64_t count) {
    for (int64_t i = 0; i < count; i++) rule.update(param[i], gradient[i] * factor, first[i], second[i]);
}

template <class Rule> DS_INLINE void update_range(const Leaf& leaf, const Rule& rule, int64_t begin, int64_t end) {
    alignas(64) float params[BLOCK], gradients[BLOCK], firsts[BLOCK], seconds[BLOCK];
    const bool streamed = leaf.count >= STREAMED && reinterpret_cast<uintptr_t>(leaf.out) % 16 == 0;
    for (int64_t start = begin; start < end; start += BLOCK) {
        const int64_t count = std::min(BLOCK, end - start);
        fetch_all(leaf, start);
        float* param = as_fp32(leaf.param, leaf.param_kind, start, count, params);
        const float* gradient = as_fp32(leaf.gradient, leaf.gradient_kind, start, count, gradients);
        float* first = as_fp32(leaf.first, leaf.first_kind, start, count, firsts);
        float* second = leaf.second ? as_fp32(leaf.second, leaf.second_kind, start, count, seconds) : seconds;
        update_block(rule, leaf.factor, param, gradient, first, second, count);
        round_into(param, leaf.param, leaf.param_kind, start, count);
        round_into(first, leaf.first, leaf.first_kind, start, count);
        if (leaf.second) round_into(second, leaf.second, leaf.second_kind, start, count);
        if (leaf.out && streamed && count == BLOCK)
            write_around_caches(param, leaf.out_kind, static_cast<uint16_t*>(leaf.out) + start);
        else if (leaf.out)
            round_into(param, leaf.out, leaf.out_kind, start, count);
    }
#if defined(__x86_64__)
    if (leaf.out && streamed) _mm_sfence();
#endif
}

template <class Rule> void portable(const Leaf& leaf, const Rule& rule, int64_t begin, int64_t end) {
    update_range(leaf, rule, begin, end);
}
template <class Rule> DS_AVX2 void avx2(const Leaf& leaf, const Rule& rule, int64_t begin, int64_t end) {
    update_range(leaf, rule, begin, end);
}
template <class Rule> DS_AVX512 void avx512(const Leaf& leaf, const Rule& rule, int64_t begin, int64_t end) {
    update_range(leaf, rule, begin, end);
}

#if defined(__x86_64__)
// to_bf16 of sixteen values.
DS_AVX512 inline __m256i to_bf16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0)));
}

// Sixteen elements of Adam's update, operation by operation as above; returns the rounded parameters.
DS_AVX512 inline __m256i update_lanes(const Leaf& leaf, const Adam& rule, int64_t i) {
    float *params = static_cast<float*>(leaf.param) + i, *firsts = static_cast<float*>(leaf.first) + i,
          *seconds = static_cast<float*>(leaf.second) + i;
    const auto* halves = reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(leaf.gradient) + i);
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(halves)), 16);
    __m512 param = _mm512_loadu_ps(params), first = _mm512_loadu_ps(firsts), second = _mm512_loadu_ps(seconds);
    __m512 gradient = _mm512_mul_ps(_mm512_castsi512_ps(wide), _mm512_set1_ps(leaf.factor));
    gradient = _mm512_fmadd_ps(_mm512_set1_ps(rule.l2), param, gradient);
    first = _mm512_fmadd_ps(_mm512_set1_ps(rule.first_weight), _mm512_sub_ps(gradient, first), first);
    second = _mm512_mul_ps(second, _mm512_set1_ps(rule.second_decay));
    second = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(rule.second_weight), gradient), gradient, second);
    const __m512 size = _mm512_add_ps(_mm512_sqrt_ps(second), _mm512_set1_ps(rule.eps));
    const __m512 step = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(rule.step), first), size);
    param = _mm512_sub_ps(_mm512_mul_ps(param, _mm512_set1_ps(rule.kept)), step);
    _mm512_storeu_ps(params, param);
    _mm512_storeu_ps(firsts, first);
    _mm512_storeu_ps(seconds, second);
    return to_bf16(param);
}

// Special form for a bf16 gradient and a bf16 copy: elements stay in registers, and the copy is written in whole lines.
// The compiled general form loses about 2 % of the bandwidth (docs/status.md).
template <> DS_AVX512 void avx512<Adam>(const Leaf& leaf, const Adam& rule, int64_t begin, int64_t end) {
    const bool lines = leaf.count >= STREAMED && leaf.out && reinterpret_cast<uintptr_t>(leaf.out) % 64 == 0;
    const bool wide = leaf.param_kind == FP32 && leaf.first_kind == FP32 && leaf.second_kind == FP32;
    const bool halves = leaf.gradient_kind == BF16 && leaf.out_kind == BF16;
    const int64_t whole = lines && wide && halves && rule.first_weight < 0.5f ? end - (end - begin) % BLOCK : begin;
    auto* out = static_cast<uint16_t*>(leaf.out);
    for (int64_t start = begin; start < whole; start += BLOCK) {
        fetch_all(leaf, start);
        for (int64_t i = start; i < start + BLOCK; i += 32) {
            const __m256i low = update_lanes(leaf, rule, i), high = update_lanes(leaf, rule, i + 16);
            const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), line);
        }
    }
    update_range(leaf, rule, whole, end);  // also waits for the writes past the caches
}
#endif

template <class Rule> void update(const Leaf& leaf, const Rule& rule, int threads) {
    using Function = void (*)(const Leaf&, const Rule&, int64_t, int64_t);
    const Function range = Versions<Function>{portable<Rule>, avx2<Rule>, avx512<Rule>}.pick();
    const int useful = static_cast<int>(std::clamp<int64_t>(leaf.count / PER_THREAD, 1, threads));
#pragma omp parallel num_threads(useful)
    {
        const int64_t blocks = (leaf.count + BLOCK - 1) / BLOCK;
        const int64_t share = (blocks + omp_get_num_threads() - 1) / omp_get_num_threads() * BLOCK;
        const int64_t begin = share * omp_get_thread_num();
        range(leaf, rule, begin, std::min(begin + share, leaf.count));
    }
}

}  // namespace ds

extern "C" {
void ds_adam(const ds::Leaf* leaf, const ds::Adam* rule, int threads) { ds::update(*leaf, *rule, threads); }
void ds_adagrad(const ds::Leaf* leaf, const ds::Adagrad* rule, int threads) { ds::update(*leaf, *rule, threads); }
void ds_lion(const ds::Leaf* leaf, const ds::Lion* rule, int threads) { ds::update(*leaf, *rule, threads); }
}
