// Sum of squares in one pass, in double: accurate for any split of a tensor; infinite or NaN only if a value is.
#include <algorithm>
#include <vector>

#include "numbers.h"

namespace ds {

// Elements per partial sum; partial sums are added in order, so the number of threads does not change the result.
constexpr int64_t CHUNK = 1 << 16;
constexpr int64_t BLOCK = 128;
constexpr int64_t LANES = 32;
constexpr int64_t FAR = 4096;  // prefetch distance in bytes: hardware prefetching is too slow for a single stream

DS_INLINE double sum_chunk(const void* base, Kind kind, int64_t begin, int64_t end) {
    alignas(64) float scratch[BLOCK];
    alignas(64) double lanes[LANES] = {};
    for (int64_t start = begin; start < end; start += BLOCK) {
        const int64_t count = std::min(BLOCK, end - start);
        const int64_t bytes = kind == FP32 ? 4 : 2;
        for (int64_t line = 0; line < BLOCK * bytes; line += 64)
            __builtin_prefetch(static_cast<const char*>(base) + start * bytes + FAR + line);
        const float* values = static_cast<const float*>(base) + start;
        if (kind != FP32) {
            widen(static_cast<const uint16_t*>(base) + start, kind, scratch, count);
            values = scratch;
        }
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) {
                const double value = values[i + lane];
                lanes[lane] += value * value;
            }
        for (; i < count; i++) lanes[0] += static_cast<double>(values[i]) * values[i];
    }
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    return sum;
}

double portable(const void* base, Kind kind, int64_t begin, int64_t end) { return sum_chunk(base, kind, begin, end); }
DS_AVX2 double avx2(const void* base, Kind kind, int64_t begin, int64_t end) {
    return sum_chunk(base, kind, begin, end);
}
DS_AVX512 double avx512(const void* base, Kind kind, int64_t begin, int64_t end) {
    return sum_chunk(base, kind, begin, end);
}

}  // namespace ds

namespace {

double sum_of_squares(const void* values, ds::Kind kind, int64_t count, int threads) {
    using Function = double (*)(const void*, ds::Kind, int64_t, int64_t);
    const Function sum = ds::Versions<Function>{ds::portable, ds::avx2, ds::avx512}.pick();
    if (count <= ds::CHUNK) return sum(values, kind, 0, count);
    const int64_t chunks = (count + ds::CHUNK - 1) / ds::CHUNK;
    std::vector<double> sums(static_cast<size_t>(chunks));
#pragma omp parallel for num_threads(static_cast<int>(std::clamp<int64_t>(chunks, 1, threads)))
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        sums[static_cast<size_t>(chunk)] =
            sum(values, kind, chunk * ds::CHUNK, std::min((chunk + 1) * ds::CHUNK, count));
    double total = 0.0;
    for (double part : sums) total += part;
    return total;
}

}  // namespace

// sums[i]: sum of squares of the counts[i] numbers at values[i].
extern "C" void ds_sums_of_squares(const void* const* values, ds::Kind kind, const int64_t* counts, int64_t tensors,
                                   int threads, double* sums) {
    for (int64_t i = 0; i < tensors; i++) sums[i] = sum_of_squares(values[i], kind, counts[i], threads);
}
