// Product of bf16 matrices in AMX tiles.
#include <algorithm>

#include "products_parts.h"
#include "tiles.h"

#if defined(__x86_64__)
namespace ds {

// The matrix, in its memory layout, is the left operand; tiles of sums are [outputs, rows].
template <int A, int B>
DS_AMX static DS_INLINE void tile_sums(const uint16_t* w, const char* x, const Part& p, int64_t columns, float* sums) {
    const int64_t bytes = 2 * p.matrix.inputs, block = columns * bytes, chunk = 64 * columns;
    const int per = static_cast<int>((p.next_bytes / 64 * LANES + p.matrix.inputs - 1) / p.matrix.inputs);
    const char* next = p.next;
    _tile_zero(0);
    if (A > 1) _tile_zero(1);
    if (B > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
    for (int64_t k = 0; k < p.matrix.inputs; k += LANES, x += chunk) {
        for (int i = 0; i < per; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        _tile_loadd(4, w + k, bytes);
        if (A > 1) _tile_loadd(5, w + k + 16 * p.matrix.inputs, bytes);
        _tile_loadd(6, x, 4 * columns);
        if (B > 1) _tile_loadd(7, x + block, 4 * columns);
        _tile_dpbf16ps(0, 4, 6);
        if (A > 1) _tile_dpbf16ps(1, 5, 6);
        if (B > 1) _tile_dpbf16ps(2, 4, 7);
        if (A > 1 && B > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * columns);
    if (A > 1) _tile_stored(1, sums + 256, 4 * columns);
    if (B > 1) _tile_stored(2, sums + 512, 4 * columns);
    if (A > 1 && B > 1) _tile_stored(3, sums + 768, 4 * columns);
    DS_FENCE;
}

DS_AMX static void in_tiles(const Part& p) {
    const int64_t columns = std::min<int64_t>(16, p.x.rows), inputs = p.matrix.inputs;
    const auto* w = static_cast<const uint16_t*>(p.matrix.weights) + p.output * inputs;
    const char* x = p.x.values.data() + 2 * p.row * inputs;
    alignas(64) float sums[1024];
    std::vector<uint16_t> last;
    const bool ragged = p.outputs % 16;
    if (ragged) {  // tiles read sixteen outputs
        last.assign(static_cast<size_t>(PANEL * inputs), 0);
        std::copy(w, w + p.outputs * inputs, last.begin());
        w = last.data();
    }
    DS_FENCE;
    const bool wide = p.outputs > 16, tall = p.rows > 16;
    if (wide && tall) tile_sums<2, 2>(w, x, p, columns, sums);
    else if (wide) tile_sums<2, 1>(w, x, p, columns, sums);
    else if (tall) tile_sums<1, 2>(w, x, p, columns, sums);
    else tile_sums<1, 1>(w, x, p, columns, sums);
    for (int b = 0; b <= tall; b++)
        for (int a = 0; a <= wide; a++) {
            const float* tile = sums + 256 * a + 512 * b;
            if (columns == 16)
                transpose16(tile, 16, &p.sums[16 * b][16 * a], PANEL);
            else
                for (int64_t r = 0; r < columns; r++)
                    for (int n = 0; n < 16; n++) p.sums[r][16 * a + n] = tile[n * columns + r];
        }
}

DS_AMX void end_tiles() { _tile_release(); }
DS_AMX void begin_tiles(int64_t rows) { configure_tiles(16, static_cast<int>(std::min<int64_t>(16, rows))); }
const Kernel tiles{in_tiles, 32};

}  // namespace ds
#endif
