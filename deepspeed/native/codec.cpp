// Block quantisation of communicated values: encode, decode, and the sum of encoded parts, each in one pass over
// memory. deepspeed/comm/collectives/block_codec.py defines the format and has the same arithmetic in torch; all
// versions compute the same bits. For little-endian processors.
#include <algorithm>

#include "numbers.h"

namespace ds {

// Mirrored by `_NativeLayout` in deepspeed/comm/collectives/block_codec.py.
struct BlockLayout {
    int64_t bits, block, segments, blocks;
    const int64_t* borders;  // first element of each segment, and the end
    const int64_t* firsts;   // first block of each segment, and the end
    const int64_t* places;   // first byte of each segment's codes, behind the scales
};

namespace {

constexpr int64_t BLOCK = 256;  // elements of the usual block, for which the loops have fixed bounds
constexpr int64_t LARGEST = 1024;
// Number of elements below which a second thread does not pay off.
constexpr int64_t PER_THREAD = 1 << 15;
constexpr uint32_t INFINITE = 0x7f800000u;
constexpr uint16_t SMALLEST = 0x0080u;  // smallest normal bf16
constexpr float ROUND = 0x1.8p23f;      // adding it rounds to an integer, ties to even, in the low bits
constexpr int32_t PAYLOAD = 3;          // kind of an encoded part of a sum; the others are those of numbers.h

// Position of one block.
struct Place {
    int64_t start, count, byte;
};

// Blocks in ascending order, with the segment of the last one.
struct Walk {
    const BlockLayout& layout;
    int64_t segment;

    Walk(const BlockLayout& layout, int64_t block) : layout(layout) {
        segment = std::upper_bound(layout.firsts, layout.firsts + layout.segments, block) - layout.firsts - 1;
    }

    DS_INLINE Place at(int64_t block) {
        while (layout.firsts[segment + 1] <= block) segment++;
        const int64_t offset = (block - layout.firsts[segment]) * layout.block;
        const int64_t start = layout.borders[segment] + offset;
        const int64_t count = std::min(layout.block, layout.borders[segment + 1] - start);
        return {start, count, 2 * layout.blocks + layout.places[segment] + offset * layout.bits / 8};
    }
};

// -- codes ------------------------------------------------------------------------------------------------------------

// Two codes per byte, the first one in the low half.
DS_INLINE void pack(const int8_t* codes, int64_t count, uint8_t* bytes) {
    for (int64_t i = 0; i < (count + 1) / 2; i++) {
        uint16_t two;
        std::memcpy(&two, codes + 2 * i, sizeof two);
        bytes[i] = static_cast<uint8_t>((two & 0x0fu) | ((two >> 4) & 0xf0u));
    }
}

// Four-bit codes without their sign extension.
DS_INLINE void unpack(const uint8_t* bytes, int64_t count, int8_t* codes) {
    for (int64_t i = 0; i < (count + 1) / 2; i++) {
        const auto two = static_cast<uint16_t>((bytes[i] & 0x0fu) | ((bytes[i] & 0xf0u) << 4));
        std::memcpy(codes + 2 * i, &two, sizeof two);
    }
}

DS_INLINE int32_t extended(int8_t code, bool packed) { return packed ? (code ^ 8) - 8 : code; }

// Codes of a block with values that are not finite: infinities are 1 and -1, NaN is the lowest code.
void encode_special(const float* values, int64_t count, bool packed, int8_t* codes) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = as_bits(values[i]), magnitude = bits & 0x7fffffffu;
        const int infinity = magnitude < INFINITE ? 0 : bits >> 31 ? -1 : 1;
        codes[i] = static_cast<int8_t>(magnitude > INFINITE ? (packed ? -8 : -128) : infinity);
    }
}

void decode_special(const int8_t* codes, int64_t count, bool packed, float* values) {
    for (int64_t i = 0; i < count; i++) {
        const int32_t code = extended(codes[i], packed);
        const uint32_t infinity = code == 0 ? 0u : code > 0 ? INFINITE : INFINITE | 0x80000000u;
        values[i] = as_float(code == (packed ? -8 : -128) ? 0x7fc00000u : infinity);
    }
}

// -- encoding ---------------------------------------------------------------------------------------------------------

struct Encoding {
    const BlockLayout* layout;
    const void* values;
    Kind kind;
    uint8_t* payload;
    uint16_t* memory;  // errors of earlier encodings in bf16, or null
    float kept, renewed;
};

// Bits of the largest magnitude; infinity and then NaN are the largest of all.
DS_INLINE uint32_t largest(const float* values, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) most = std::max(most, as_bits(values[i]) & 0x7fffffffu);
    return most;
}

// No clamp: the rounded scale is at most 2^-9 smaller, so that no quotient rounds to more than the largest code.
DS_INLINE void quantise(const float* values, int64_t count, float inverse, int8_t* codes) {
    for (int64_t i = 0; i < count; i++) codes[i] = static_cast<int8_t>(as_bits(values[i] * inverse + ROUND));
}

DS_INLINE void remember(const float* values, int64_t count, float inverse, float scale, float kept, float renewed,
                        uint16_t* memory) {
    for (int64_t i = 0; i < count; i++) {
        const float decoded = (values[i] * inverse + ROUND - ROUND) * scale;
        memory[i] = to_bf16(kept * from_bf16(memory[i]) + renewed * (values[i] - decoded));
    }
}

DS_INLINE void add_memory(const float* values, const uint16_t* memory, int64_t count, float* sum) {
    for (int64_t i = 0; i < count; i++) sum[i] = values[i] + from_bf16(memory[i]);
}

DS_INLINE void encode_block(const Encoding& e, int64_t block, int64_t start, int64_t count, uint8_t* bytes) {
    alignas(64) float scratch[LARGEST];
    alignas(64) int8_t unpacked[LARGEST + 1];
    const bool packed = e.layout->bits == 4;
    const float* values = static_cast<const float*>(e.values) + start;
    if (e.kind != FP32) {
        widen(static_cast<const uint16_t*>(e.values) + start, e.kind, scratch, count);
        values = scratch;
    }
    uint16_t* memory = e.memory ? e.memory + start : nullptr;
    if (memory) {
        add_memory(values, memory, count, scratch);
        values = scratch;
    }
    const uint32_t most = largest(values, count);
    uint16_t half = to_bf16(as_float(most) / (packed ? 7.0f : 127.0f));
    if (half < SMALLEST) half = 0;
    const float scale = from_bf16(half);
    reinterpret_cast<uint16_t*>(e.payload)[block] = half;
    int8_t* codes = packed ? unpacked : reinterpret_cast<int8_t*>(bytes);
    if (most >= INFINITE) {
        encode_special(values, count, packed, codes);
        if (memory) std::fill_n(memory, count, uint16_t{0});
    } else {
        const float inverse = half ? 1.0f / scale : 0.0f;
        quantise(values, count, inverse, codes);
        if (memory) remember(values, count, inverse, scale, e.kept, e.renewed, memory);
    }
    if (packed) {
        unpacked[count] = 0;
        pack(unpacked, count, bytes);
    }
}

DS_INLINE void encode_range(const Encoding& e, int64_t begin, int64_t end) {
    Walk walk(*e.layout, begin);
    for (int64_t block = begin; block < end; block++) {
        const Place place = walk.at(block);
        if (place.count == BLOCK)
            encode_block(e, block, place.start, BLOCK, e.payload + place.byte);
        else
            encode_block(e, block, place.start, place.count, e.payload + place.byte);
    }
}

void portable(const Encoding& e, int64_t begin, int64_t end) { encode_range(e, begin, end); }
DS_AVX2 void avx2(const Encoding& e, int64_t begin, int64_t end) { encode_range(e, begin, end); }
DS_AVX512 void avx512(const Encoding& e, int64_t begin, int64_t end) { encode_range(e, begin, end); }

// -- decoding ---------------------------------------------------------------------------------------------------------

DS_INLINE void dequantise(const int8_t* codes, int64_t count, bool packed, float scale, float* values) {
    if (packed)
        for (int64_t i = 0; i < count; i++) values[i] = static_cast<float>(extended(codes[i], true)) * scale;
    else
        for (int64_t i = 0; i < count; i++) values[i] = static_cast<float>(codes[i]) * scale;
}

DS_INLINE void decode_block(const BlockLayout& layout, const uint8_t* payload, int64_t block, int64_t byte,
                            int64_t count, float* values) {
    alignas(64) int8_t unpacked[LARGEST + 1];
    const bool packed = layout.bits == 4;
    const auto* codes = reinterpret_cast<const int8_t*>(payload + byte);
    if (packed) {
        unpack(payload + byte, count, unpacked);
        codes = unpacked;
    }
    const float scale = from_bf16(reinterpret_cast<const uint16_t*>(payload)[block]);
    if ((as_bits(scale) & INFINITE) == INFINITE)
        decode_special(codes, count, packed, values);
    else
        dequantise(codes, count, packed, scale, values);
}

struct Decoding {
    const BlockLayout* layout;
    const uint8_t* payload;
    void* out;
    Kind kind;
};

DS_INLINE void decode_to(const Decoding& d, int64_t block, int64_t start, int64_t count, int64_t byte) {
    alignas(64) float scratch[LARGEST];
    if (d.kind == FP32) {
        decode_block(*d.layout, d.payload, block, byte, count, static_cast<float*>(d.out) + start);
        return;
    }
    decode_block(*d.layout, d.payload, block, byte, count, scratch);
    narrow(scratch, d.kind, static_cast<uint16_t*>(d.out) + start, count);
}

DS_INLINE void decode_range(const Decoding& d, int64_t begin, int64_t end) {
    Walk walk(*d.layout, begin);
    for (int64_t block = begin; block < end; block++) {
        const Place place = walk.at(block);
        if (place.count == BLOCK)
            decode_to(d, block, place.start, BLOCK, place.byte);
        else
            decode_to(d, block, place.start, place.count, place.byte);
    }
}

void portable(const Decoding& d, int64_t begin, int64_t end) { decode_range(d, begin, end); }
DS_AVX2 void avx2(const Decoding& d, int64_t begin, int64_t end) { decode_range(d, begin, end); }
DS_AVX512 void avx512(const Decoding& d, int64_t begin, int64_t end) { decode_range(d, begin, end); }

// -- sums -------------------------------------------------------------------------------------------------------------

struct Sum {
    const BlockLayout* layout;
    const void* const* parts;
    const int32_t* kinds;
    int count;
    void* out;
    Kind out_kind;
    float scale;
    bool add;
};

// The values as fp32: in place, or in `scratch`.
DS_INLINE const float* as_fp32(const BlockLayout& layout, const void* base, int32_t kind, int64_t block,
                               const Place& place, int64_t count, float* scratch) {
    if (kind == FP32) return static_cast<const float*>(base) + place.start;
    if (kind == PAYLOAD)
        decode_block(layout, static_cast<const uint8_t*>(base), block, place.byte, count, scratch);
    else
        widen(static_cast<const uint16_t*>(base) + place.start, static_cast<Kind>(kind), scratch, count);
    return scratch;
}

DS_INLINE void sum_block(const Sum& s, int64_t block, const Place& place, int64_t count) {
    alignas(64) float total[LARGEST], scratch[LARGEST];
    const float* sum = as_fp32(*s.layout, s.parts[0], s.kinds[0], block, place, count, total);
    for (int part = 1; part < s.count; part++, sum = total) {
        const float* term = as_fp32(*s.layout, s.parts[part], s.kinds[part], block, place, count, scratch);
        for (int64_t i = 0; i < count; i++) total[i] = sum[i] + term[i];
    }
    if (s.scale != 1.0f) {
        for (int64_t i = 0; i < count; i++) total[i] = sum[i] * s.scale;
        sum = total;
    }
    if (s.add) {
        const float* term = as_fp32(*s.layout, s.out, s.out_kind, block, place, count, scratch);
        for (int64_t i = 0; i < count; i++) total[i] = sum[i] + term[i];
        sum = total;
    }
    if (s.out_kind == FP32)
        std::copy_n(sum, count, static_cast<float*>(s.out) + place.start);
    else
        narrow(sum, s.out_kind, static_cast<uint16_t*>(s.out) + place.start, count);
}

DS_INLINE void sum_range(const Sum& s, int64_t begin, int64_t end) {
    Walk walk(*s.layout, begin);
    for (int64_t block = begin; block < end; block++) {
        const Place place = walk.at(block);
        if (place.count == BLOCK)
            sum_block(s, block, place, BLOCK);
        else
            sum_block(s, block, place, place.count);
    }
}

void portable(const Sum& s, int64_t begin, int64_t end) { sum_range(s, begin, end); }
DS_AVX2 void avx2(const Sum& s, int64_t begin, int64_t end) { sum_range(s, begin, end); }
DS_AVX512 void avx512(const Sum& s, int64_t begin, int64_t end) { sum_range(s, begin, end); }

// ---------------------------------------------------------------------------------------------------------------------

// Do the work on ranges of blocks, one per thread.
template <class Work> void run(const Work& work, int threads) {
    using Function = void (*)(const Work&, int64_t, int64_t);
    const Function range = Versions<Function>{portable, avx2, avx512}.pick();
    const int64_t blocks = work.layout->blocks, most = blocks * work.layout->block / PER_THREAD;
    const int useful = static_cast<int>(std::clamp<int64_t>(most, 1, threads));
    const int64_t share = (blocks + useful - 1) / useful;
#pragma omp parallel for num_threads(useful) schedule(static, 1)
    for (int thread = 0; thread < useful; thread++)
        if (thread * share < blocks) range(work, thread * share, std::min((thread + 1) * share, blocks));
}

}  // namespace
}  // namespace ds

extern "C" {

void ds_block_encode(const ds::BlockLayout* layout, const void* values, ds::Kind kind, void* payload, void* memory,
                     float kept, float renewed, int threads) {
    auto *bytes = static_cast<uint8_t*>(payload);
    ds::run(ds::Encoding{layout, values, kind, bytes, static_cast<uint16_t*>(memory), kept, renewed}, threads);
}

void ds_block_decode(const ds::BlockLayout* layout, const void* payload, void* out, ds::Kind kind, int threads) {
    ds::run(ds::Decoding{layout, static_cast<const uint8_t*>(payload), out, kind}, threads);
}

// kinds[i]: that of a plain part, or 3: the part is a payload.
void ds_block_sum(const ds::BlockLayout* layout, const void* const* parts, const int32_t* kinds, int count, void* out,
                  ds::Kind kind, float scale, bool add, int threads) {
    ds::run(ds::Sum{layout, parts, kinds, count, out, kind, scale, add}, threads);
}

}
