// AVX-512 product of 8-bit matrices: rows are 15-bit integers, sums of products are exact.
#include "vectors.h"

#if defined(__x86_64__)
namespace ds {

// Widen 32 integers to 16 bits, in column order.
template <Form form> DS_AVX512 static DS_INLINE __m512i integers(const uint8_t* row, int64_t k) {
    if constexpr (form == SIGNED8)
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k)));
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k)));
}

// Add products of neighbours: a single instruction with AVX512_VNNI.
template <bool VNNI> DS_AVX512 static DS_INLINE __m512i add_products(__m512i sum, __m512i line, __m512i x) {
    if constexpr (VNNI) asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(line), "v"(x));
    else sum = _mm512_add_epi32(sum, _mm512_madd_epi16(line, x));
    return sum;
}

template <Form form, bool VNNI, int N, int R>
DS_AVX512 static DS_INLINE void integer_tile(const Part& p, Ahead& next, int64_t n, int64_t r) {
    const Matrix& m = p.matrix;
    const int64_t bytes = row_bytes(m), groups = m.inputs / m.group, span = std::min(FLUSH, m.group);
    const auto* w = reinterpret_cast<const uint8_t*>(outputs_from(p, n));
    const auto* x = reinterpret_cast<const int16_t*>(p.x.values.data()) + (p.row + r) * p.x.padded;
    const float* scale = m.scale + (p.output + n) * groups;
    __m512 sums[N][R];
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < m.inputs;) {
        __m512i whole[N][R];
        for (auto& row : whole)
            for (auto& sum : row) sum = _mm512_setzero_si512();
        const int64_t group = k / m.group, end = std::min(k + span, (group + 1) * m.group);
        for (; k < end; k += LANES) {
            next.fetch();
            for (int i = 0; i < N; i++) {
                const __m512i line = integers<form>(w + i * bytes, k);
                for (int j = 0; j < R; j++)
                    whole[i][j] = add_products<VNNI>(whole[i][j], line, _mm512_loadu_si512(x + j * p.x.padded + k));
            }
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < R; j++)
                sums[i][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[i][j]),
                                             _mm512_set1_ps(scale[i * groups + group]), sums[i][j]);
    }
    put(p, n, r, sums);
    for (int j = 0; j < R; j++)
        for (int i = 0; i < N; i++)
            p.sums[r + j][n + i] = finish(p, p.output + n + i, p.row + r + j, p.sums[r + j][n + i]);
}

template <Form form, bool VNNI, int N>
DS_AVX512 static DS_INLINE void integer_outputs(const Part& p, Ahead& next, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= p.rows; r += 4) integer_tile<form, VNNI, N, 4>(p, next, n, r);
    switch (p.rows - r) {
    case 3: integer_tile<form, VNNI, N, 3>(p, next, n, r); break;
    case 2: integer_tile<form, VNNI, N, 2>(p, next, n, r); break;
    case 1: integer_tile<form, VNNI, N, 1>(p, next, n, r);
    }
}

// Multiply one output, read as a memory stream, with R rows; lanes are not added yet.
template <Form form, bool VNNI, int R>
DS_AVX512 static DS_INLINE void integer_lanes(const Part& p, int64_t n, __m512 (&sums)[R]) {
    const Matrix& m = p.matrix;
    const int64_t span = std::min(FLUSH, m.group);
    const auto* w = reinterpret_cast<const uint8_t*>(outputs_from(p, n));
    const auto* x = reinterpret_cast<const int16_t*>(p.x.values.data());
    const float* scale = m.scale + (p.output + n) * (m.inputs / m.group);
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < m.inputs; scale++) {
        for (const int64_t last = k + m.group; k < last;) {
            __m512i whole[2][R];  // two, to hide latency
            for (auto& half : whole)
                for (auto& sum : half) sum = _mm512_setzero_si512();
            const int64_t end = std::min(k + span, last);
            for (; k < end; k += 2 * LANES) {
                __builtin_prefetch(w + k + FAR, 0, 2);
                for (int half = 0; half < 2 && k + half * LANES < end; half++) {
                    const __m512i line = integers<form>(w, k + half * LANES);
                    for (int j = 0; j < R; j++)
                        whole[half][j] = add_products<VNNI>(whole[half][j], line,
                                                            _mm512_loadu_si512(x + j * p.x.padded + k + half * LANES));
                }
            }
            k = end;
            for (int j = 0; j < R; j++)
                sums[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(whole[0][j], whole[1][j])),
                                          _mm512_set1_ps(*scale), sums[j]);
        }
    }
}

// For few rows the matrix is read as one stream; the lanes of sixteen outputs are added together.
template <Form form, bool VNNI, int R> DS_AVX512 static void integer_few(const Part& p) {
    for (int64_t n = 0; n < p.outputs; n += 16) {
        const int64_t there = std::min<int64_t>(16, p.outputs - n);
        __m512 all[R][16];
        for (int64_t i = 0; i < 16; i++) {
            __m512 lanes[R];
            if (i < there) integer_lanes<form, VNNI, R>(p, n + i, lanes);
            for (int j = 0; j < R; j++) all[j][i] = i < there ? lanes[j] : _mm512_setzero_ps();
        }
        for (int j = 0; j < R; j++) {
            _mm512_storeu_ps(&p.sums[j][n], add_lanes(all[j]));
            for (int64_t i = 0; i < there; i++)
                p.sums[j][n + i] = finish(p, p.output + n + i, p.row + j, p.sums[j][n + i]);
        }
    }
}

template <Form form, bool VNNI> DS_AVX512 static void integers_of_rows(const Part& p) {
    if (p.x.rows <= FEW) switch (p.rows) {
        case 1: return integer_few<form, VNNI, 1>(p);
        case 2: return integer_few<form, VNNI, 2>(p);
        case 3: return integer_few<form, VNNI, 3>(p);
        default: return integer_few<form, VNNI, 4>(p);
        }
    Ahead next(p.next, p.next_bytes, (p.outputs + 3) / 4 * ((p.rows + 3) / 4) * (p.matrix.inputs / LANES));
    int64_t n = 0;
    for (; n + 4 <= p.outputs; n += 4) integer_outputs<form, VNNI, 4>(p, next, n);
    for (; n < p.outputs; n++) integer_outputs<form, VNNI, 1>(p, next, n);
}

template <Form form> static Kernel integers_of() {
    return {instruction_set() >= AVX512_VNNI ? integers_of_rows<form, true> : integers_of_rows<form, false>, 32};
}

Kernel integer_vectors(Form form) {
    return form == SIGNED8 ? integers_of<SIGNED8>() : integers_of<UNSIGNED8>();
}

}  // namespace ds
#endif
