// The traffic of one bf16 Adam step with next to no arithmetic: three fp32 streams read and written in place, a 2-byte
// stream read, a 2-byte stream written. Built by memory_mix.py; AVX2.
#include <cstdint>

#include <immintrin.h>
#include <omp.h>

namespace {

enum Way { AROUND, ALL_AROUND, THROUGH, FETCHED, IN_PLACE };  // how the 2-byte copy is written; mirrored in WAYS

constexpr int64_t BLOCK = 64;

struct Streams {
    float* kept[3];
    uint16_t *gradient, *copy;
    int64_t count;
};

inline void fetch(const void* at, int64_t ahead, int64_t bytes) {
    const char* start = static_cast<const char*>(at) + ahead;
    for (int64_t byte = 0; byte < bytes; byte += 64) _mm_prefetch(start + byte, _MM_HINT_T0);
}

template <Way way> void touch(const Streams& s, int64_t begin, int64_t end, int64_t ahead) {
    const __m256 least = _mm256_set1_ps(1e-30f);
    for (int64_t i = begin; i < end; i += BLOCK) {
        if (ahead) {
            for (const float* stream : s.kept) fetch(stream + i, ahead, BLOCK * 4);
            fetch(s.gradient + i, ahead / 2, BLOCK * 2);
            if (way == FETCHED) fetch(s.copy + i, ahead / 2, BLOCK * 2);
        }
        for (float* stream : s.kept)
            for (int64_t j = i; j < i + BLOCK; j += 8) {
                const __m256 value = _mm256_max_ps(_mm256_load_ps(stream + j), least);
                way == ALL_AROUND ? _mm256_stream_ps(stream + j, value) : _mm256_store_ps(stream + j, value);
            }
        for (int64_t j = i; j < i + BLOCK; j += 16) {
            __m256i half = _mm256_load_si256(reinterpret_cast<__m256i*>(s.gradient + j));
            half = _mm256_or_si256(half, _mm256_set1_epi16(1));
            auto* to = reinterpret_cast<__m256i*>((way == IN_PLACE ? s.gradient : s.copy) + j);
            way == AROUND || way == ALL_AROUND ? _mm256_stream_si256(to, half) : _mm256_store_si256(to, half);
        }
    }
    _mm_sfence();
}

}  // namespace

extern "C" void touch_all(const Streams* streams, int way, int64_t ahead, int threads) {
    constexpr void (*ways[])(const Streams&, int64_t, int64_t, int64_t) = {
        touch<AROUND>, touch<ALL_AROUND>, touch<THROUGH>, touch<FETCHED>, touch<IN_PLACE>};
#pragma omp parallel num_threads(threads)
    {
        const int64_t share = streams->count / BLOCK / omp_get_num_threads() * BLOCK;
        const int64_t begin = share * omp_get_thread_num();
        ways[way](*streams, begin, begin + share, ahead);
    }
}
