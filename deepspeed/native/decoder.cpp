// Decoder layers: norms, rotary embeddings, activations, and the products between them.
#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "adapters.h"
#include "lossless.h"

namespace ds {

enum Activation : int32_t { SILU, GELU, GELU_TANH, RELU };

constexpr int64_t CHUNK = 128;  // rows of the feed-forward part at a time, so that activations stay in cache

// Mirrored by `Norm` in deepspeed/inference/executors/native_tensors.py.
struct Norm {
    const void* weight;  // [width], null: no norm
    const void* bias;    // or null
    Kind kind;
    int32_t centred;  // subtract the mean, as LayerNorm does
    int32_t joint;    // of queries or keys: over all heads together
    float eps;
};

// Gated feed-forward network, or one expert. Mirrored by `GatedMlp` in deepspeed/inference/executors/native_tensors.py.
struct GatedMlp {
    Matrix gate, up, down;  // without weights in a layer that has only experts
};

// Mirrored by `Experts` in deepspeed/inference/executors/native_tensors.py.
struct Experts {
    Matrix router;         // [count, width]
    Matrix shared_gate;    // [1, width]: logit of the weight of the layer's own `mlp`, which all rows use
    const GatedMlp* each;  // [count]
    int64_t count, chosen;  // count 0: the layer has no experts
    int32_t normalized;     // the weights of a row's experts add up to 1
};

// Mirrored by `Layer` in deepspeed/inference/executors/native_tensors.py.
struct Layer {
    Norm before, after, query, key;
    Matrix q, k, v, out;
    GatedMlp mlp;
    Experts experts;
    Heads heads;
    Activation activation;
};

DS_INLINE float read(const void* values, Kind kind, int64_t at) {
    return kind == FP32 ? static_cast<const float*>(values)[at] : from_bf16(static_cast<const uint16_t*>(values)[at]);
}

DS_INLINE float sum(const float* values, int64_t count, float mean) {
    alignas(64) float lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int64_t l = 0; l < 16; l++) lanes[l] += (values[i + l] - mean) * (values[i + l] - mean);
    for (; i < count; i++) lanes[0] += (values[i] - mean) * (values[i] - mean);
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

DS_INLINE void norm_row(const Norm& norm, const float* x, float* out, int64_t width) {
    float mean = 0.0f;
    if (norm.centred) {
        for (int64_t i = 0; i < width; i++) mean += x[i];
        mean /= static_cast<float>(width);
    }
    const float factor = 1.0f / std::sqrt(sum(x, width, mean) / static_cast<float>(width) + norm.eps);
    if (norm.kind == FP32) {
        const auto* weight = static_cast<const float*>(norm.weight);
        for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * factor * weight[i];
    } else {
        const auto* weight = static_cast<const uint16_t*>(norm.weight);
        for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * factor * from_bf16(weight[i]);
    }
    if (norm.bias)
        for (int64_t i = 0; i < width; i++) out[i] += read(norm.bias, norm.kind, i);
}

DS_INLINE void rotate(float* x, const float* cosines, const float* sines, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        const float one = x[i], two = x[i + half];
        x[i] = one * cosines[i] - two * sines[i];
        x[i + half] = two * cosines[i + half] + one * sines[i + half];
    }
}

DS_INLINE void store(const float* x, void* pool, Kind kind, int64_t at, int64_t count) {
    if (kind == FP32) std::copy(x, x + count, static_cast<float*>(pool) + at);
    else narrow(x, kind, static_cast<uint16_t*>(pool) + at, count);
}

DS_INLINE float logistic(float x) {  // for any sign, with an exponential for x ≤ 0
    const float e = exponential(-std::fabs(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

DS_INLINE void activate(Activation activation, float* gate, const float* up, int64_t count) {
    switch (activation) {
    case SILU:
        for (int64_t i = 0; i < count; i++) gate[i] = gate[i] * logistic(gate[i]) * up[i];
        break;
    case GELU_TANH:  // (1 + tanh y) / 2 is the logistic function of 2 y
        for (int64_t i = 0; i < count; i++) {
            const float x = gate[i], y = 1.5957691216f * (x + 0.044715f * x * x * x);
            gate[i] = x * logistic(y) * up[i];
        }
        break;
    case GELU:
        for (int64_t i = 0; i < count; i++) gate[i] *= 0.5f * (1.0f + std::erf(gate[i] * 0.70710678f)) * up[i];
        break;
    case RELU:
        for (int64_t i = 0; i < count; i++) gate[i] = std::max(gate[i], 0.0f) * up[i];
    }
}

// Index of a row's (first) largest value; -1 if it is not finite.
DS_INLINE int64_t largest(const float* x, int64_t count) {
    alignas(64) float lanes[16];
    alignas(64) int32_t odd[16] = {};  // lanes with NaN
    std::fill(lanes, lanes + 16, -INFINITY);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int64_t l = 0; l < 16; l++) {
            lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
            odd[l] |= x[i + l] != x[i + l];
        }
    for (; i < count; i++) {
        lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
        odd[0] |= x[i] != x[i];
    }
    const float found = *std::max_element(lanes, lanes + 16);
    if (!std::isfinite(found) || std::any_of(odd, odd + 16, [](int32_t one) { return one; })) return -1;
    return std::find(x, x + count, found) - x;
}

// Convert a row of a matrix to fp32; integers are rounded to `kind` first.
DS_INLINE void read_row(const Matrix& m, int64_t row, Kind kind, float* out) {
    const char* bytes = static_cast<const char*>(m.weights) + row * row_bytes(m);
    if (m.form == WHOLE) std::copy_n(reinterpret_cast<const float*>(bytes), m.inputs, out);
    else if (m.form == HALF) widen(reinterpret_cast<const uint16_t*>(bytes), BF16, out, m.inputs);
    else if (m.form == LOSSLESS) {
        static thread_local std::vector<uint16_t> halves;
        halves.resize(static_cast<size_t>(m.inputs));
        unpack(m, row, 1, halves.data());
        widen(halves.data(), BF16, out, m.inputs);
    }
    else
        for (int64_t k = 0; k < m.inputs; k++) {
            const int64_t group = row * (m.inputs / m.group) + k / m.group;
            const float value = static_cast<float>(integer(m, row, k)) * m.scale[group];
            out[k] = m.offset ? value + m.offset[group] : value;
            if (kind == BF16) out[k] = from_bf16(to_bf16(out[k]));
        }
}

// Code between the products, compiled once per instruction set.
struct Between {
    void (*norm)(const Norm&, const float* x, float* out, int64_t rows, int64_t width);
    void (*place)(const Layer&, const Pass&, const int64_t* span, float* qkv);
    void (*activate)(Activation, float* gate, const float* up, int64_t count);
    int64_t (*largest)(const float* x, int64_t count);
};

#define DS_BETWEEN(NAME, TARGET)                                                                                       \
    TARGET static void NAME##_norm(const Norm& norm, const float* x, float* out, int64_t rows, int64_t width) {        \
        for (int64_t row = 0; row < rows; row++) norm_row(norm, x + row * width, out + row * width, width);            \
    }                                                                                                                  \
    TARGET static void NAME##_place(const Layer& layer, const Pass& pass, const int64_t* span, float* qkv) {           \
        place_span(layer, pass, span, qkv);                                                                            \
    }                                                                                                                  \
    TARGET static void NAME##_activate(Activation activation, float* gate, const float* up, int64_t count) {           \
        activate(activation, gate, up, count);                                                                         \
    }                                                                                                                  \
    TARGET static int64_t NAME##_largest(const float* x, int64_t count) { return largest(x, count); }                  \
    static const Between NAME = {NAME##_norm, NAME##_place, NAME##_activate, NAME##_largest};

// Normalise and rotate queries and keys of a sequence's rows, and store keys and values in their pages.
DS_INLINE void place_span(const Layer& layer, const Pass& pass, const int64_t* span, float* qkv) {
    const Heads& h = layer.heads;
    const int64_t stride = (h.count + 2 * h.cached) * h.size;
    for (int64_t r = 0; r < span[1]; r++) {
        const int64_t position = span[2] + r, at = slot(pass, pass.pages + span[3], position);
        float* row = qkv + (span[0] + r) * stride;
        if (layer.query.joint) norm_row(layer.query, row, row, h.count * h.size);
        if (layer.key.joint) norm_row(layer.key, row + h.count * h.size, row + h.count * h.size, h.cached * h.size);
        for (int64_t head = 0; head < h.count + h.cached; head++) {
            const Norm& norm = head < h.count ? layer.query : layer.key;
            float* one = row + head * h.size;
            if (norm.weight && !norm.joint) norm_row(norm, one, one, h.size);
            rotate(one, pass.cosines + position * h.rotary, pass.sines + position * h.rotary, h.rotary);
        }
        store(row + h.count * h.size, h.keys, h.kind, at * h.cached * h.size, h.cached * h.size);
        store(row + (h.count + h.cached) * h.size, h.values, h.kind, at * h.cached * h.size, h.cached * h.size);
    }
}

DS_BETWEEN(portable_between, )
DS_BETWEEN(avx2_between, DS_AVX2)
DS_BETWEEN(avx512_between, DS_AVX512)

static const Between& between() {
    return *Versions<const Between*>{&portable_between, &avx2_between, &avx512_between}.pick();
}

static float* sized(std::vector<float>& buffer, int64_t count) {
    buffer.resize(static_cast<size_t>(count));
    return buffer.data();
}

// Products of the same rows, those with matrices of one form at once.
static void multiply_all(const Product* products, int64_t count, Input& input, const float* x, int64_t rows,
                         int64_t stride, int threads) {
    for (int64_t first = 0, end = 1; first < count; first = end++) {
        const Matrix& matrix = *products[first].matrix;
        while (end < count && products[end].matrix->form == matrix.form) end++;
        input.prepare(x, rows, matrix.inputs, matrix.form);
        multiply(products + first, end - first, input, stride, false, threads);
    }
}

static void attention_part(const Layer& layer, const Pass& pass, int64_t number) {
    static thread_local std::vector<float> buffers[3];
    static thread_local Input input;
    const Heads& h = layer.heads;
    const int64_t rows = pass.rows, width = layer.q.inputs, stride = (h.count + 2 * h.cached) * h.size;
    float* normed = sized(buffers[0], rows * width);
    float* qkv = sized(buffers[1], rows * stride);
    float* mixed = sized(buffers[2], rows * h.count * h.size);
    between().norm(layer.before, pass.x, normed, rows, width);
    const Product products[] = {{&layer.q, qkv},
                                {&layer.k, qkv + layer.q.outputs},
                                {&layer.v, qkv + layer.q.outputs + layer.k.outputs}};
    multiply_all(products, 3, input, normed, rows, stride, pass.threads);
    if (pass.adapted) {
        const int64_t keys = layer.q.outputs, values = keys + layer.k.outputs;
        const Adapted parts[] = {{&LayerAdapter::q, qkv, layer.q.outputs, stride},
                                 {&LayerAdapter::k, qkv + keys, layer.k.outputs, stride},
                                 {&LayerAdapter::v, qkv + values, layer.v.outputs, stride}};
        adapt(pass, number, 0, rows, normed, width, parts, 3);
    }
    for (int64_t s = 0; s < pass.sequences; s++) between().place(layer, pass, pass.spans + 4 * s, qkv);
    attend(pass, h, qkv, stride, mixed);
    input.prepare(mixed, rows, h.count * h.size, layer.out.form);
    multiply(layer.out, input, pass.x, width, true, pass.threads);
    if (pass.adapted) {
        const Adapted part{&LayerAdapter::out, pass.x, width, width};
        adapt(pass, number, 0, rows, mixed, h.count * h.size, &part, 1);
    }
}

// Layer number `layer` of a pass, whose adapters change a network; its rows begin at row `first` of the pass.
struct Place {
    const Pass& pass;
    int64_t layer, first;
};

// out[row] = the network's output, added to `out` if `add`. `rows` are at most CHUNK. `place`: null without adapters.
static void gated(const GatedMlp& mlp, Activation activation, const float* normed, int64_t rows, float* out, bool add,
                  int threads, const Place* place = nullptr) {
    static thread_local std::vector<float> buffers[2];
    static thread_local Input input;
    const int64_t width = mlp.gate.inputs, inner = mlp.gate.outputs;
    float *gate = sized(buffers[0], rows * inner), *up = sized(buffers[1], rows * inner);
    const Product products[] = {{&mlp.gate, gate}, {&mlp.up, up}};
    multiply_all(products, 2, input, normed, rows, inner, threads);
    if (place) {
        const Adapted parts[] = {{&LayerAdapter::gate, gate, inner, inner}, {&LayerAdapter::up, up, inner, inner}};
        adapt(place->pass, place->layer, place->first, rows, normed, width, parts, 2);
    }
    between().activate(activation, gate, up, rows * inner);
    input.prepare(gate, rows, inner, mlp.down.form);
    multiply(mlp.down, input, out, width, add, threads);
    if (place) {
        const Adapted part{&LayerAdapter::down, out, width, width};
        adapt(place->pass, place->layer, place->first, rows, gate, inner, &part, 1);
    }
}

// Experts of a row, ascending, and their weights, from the router's logits. If a logit is NaN, so are all weights.
static void choose(const Experts& experts, const float* logits, int64_t* chosen, float* weights) {
    const int64_t count = experts.count;
    float largest = -INFINITY, total = 0.0f, taken = 0.0f;
    bool undefined = false;
    for (int64_t e = 0; e < count; e++) {
        undefined = undefined || std::isnan(logits[e]);
        largest = std::max(largest, logits[e]);
    }
    for (int64_t e = 0; e < count; e++) total += exponential(logits[e] - largest);
    static thread_local std::vector<char> used;
    used.assign(static_cast<size_t>(count), 0);
    for (int64_t k = 0; k < experts.chosen; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < count; e++)
            if (!used[static_cast<size_t>(e)] && (best < 0 || logits[e] > logits[best])) best = e;
        used[static_cast<size_t>(best)] = 1;
        taken += exponential(logits[best] - largest);
    }
    for (int64_t e = 0, k = 0; e < count; e++) {
        if (!used[static_cast<size_t>(e)]) continue;
        chosen[k] = e;
        weights[k++] = undefined ? NAN : exponential(logits[e] - largest) / (experts.normalized ? taken : total);
    }
}

static void add_scaled(float* x, const float* values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += factor * values[i];
}

// Rows are sorted by expert; each expert that has rows is multiplied with them once. A row's results are added in the
// order of experts, so its bits do not depend on other rows.
static void mixture(const Layer& layer, const Pass& pass, int64_t number) {
    static thread_local std::vector<float> buffers[5];
    static thread_local std::vector<int64_t> chosen, starts, places;
    static thread_local Input input;
    const Experts& experts = layer.experts;
    const int64_t rows = pass.rows, width = experts.router.inputs, count = experts.count, k = experts.chosen;
    float* normed = sized(buffers[0], rows * width);
    float* logits = sized(buffers[1], rows * count);
    float* weights = sized(buffers[2], rows * k);
    between().norm(layer.after, pass.x, normed, rows, width);
    input.prepare(normed, rows, width, experts.router.form);
    multiply(experts.router, input, logits, count, false, pass.threads);
    chosen.resize(static_cast<size_t>(rows * k)), places.resize(static_cast<size_t>(rows * k));
    for (int64_t row = 0; row < rows; row++)
        choose(experts, logits + row * count, chosen.data() + row * k, weights + row * k);
    starts.assign(static_cast<size_t>(count + 1), 0);  // where each expert's rows end, while they are placed
    for (int64_t expert : chosen) starts[static_cast<size_t>(expert) + 1]++;
    for (int64_t e = 0; e < count; e++) starts[static_cast<size_t>(e) + 1] += starts[static_cast<size_t>(e)];
    for (int64_t i = 0; i < rows * k; i++)
        places[static_cast<size_t>(starts[static_cast<size_t>(chosen[static_cast<size_t>(i)])]++)] = i;
    for (int64_t e = 0, from = 0; e < count; e++)
        for (const int64_t end = starts[static_cast<size_t>(e)]; from < end;) {
            const int64_t some = std::min(CHUNK, end - from);
            float *inputs = sized(buffers[3], some * width), *results = sized(buffers[4], some * width);
            for (int64_t i = 0; i < some; i++)
                std::copy_n(normed + places[static_cast<size_t>(from + i)] / k * width, width, inputs + i * width);
            gated(experts.each[e], layer.activation, inputs, some, results, false, pass.threads);
            for (int64_t i = 0; i < some; i++) {
                const int64_t place = places[static_cast<size_t>(from + i)];
                add_scaled(pass.x + place / k * width, results + i * width, weights[place], width);
            }
            from += some;
        }
    if (!layer.mlp.gate.weights) return;
    for (int64_t row = 0; row < rows; row += CHUNK) {
        const int64_t some = std::min(CHUNK, rows - row);
        float *results = sized(buffers[4], some * width), *shares = sized(buffers[2], some);
        const Place place{pass, number, row};
        gated(layer.mlp, layer.activation, normed + row * width, some, results, false, pass.threads,
              pass.adapted ? &place : nullptr);
        input.prepare(normed + row * width, some, width, experts.shared_gate.form);
        multiply(experts.shared_gate, input, shares, 1, false, pass.threads);
        for (int64_t i = 0; i < some; i++)
            add_scaled(pass.x + (row + i) * width, results + i * width, logistic(shares[i]), width);
    }
}

static void feed_forward(const Layer& layer, const Pass& pass, int64_t number) {
    static thread_local std::vector<float> buffer;
    if (layer.experts.count) return mixture(layer, pass, number);
    const int64_t width = layer.mlp.gate.inputs;
    for (int64_t row = 0; row < pass.rows; row += CHUNK) {
        const int64_t rows = std::min(CHUNK, pass.rows - row);
        float *normed = sized(buffer, rows * width), *x = pass.x + row * width;
        between().norm(layer.after, x, normed, rows, width);
        const Place place{pass, number, row};
        gated(layer.mlp, layer.activation, normed, rows, x, true, pass.threads, pass.adapted ? &place : nullptr);
    }
}

}  // namespace ds

extern "C" {

// parts: 1: attention, 2: feed-forward network, 3: both. Adapters begin with the first of these layers.
void ds_layers(const ds::Layer* layers, int64_t count, const ds::Pass* pass, int32_t parts) {
    for (int64_t i = 0; i < count; i++) {
        if (parts & 1) ds::attention_part(layers[i], *pass, i);
        if (parts & 2) ds::feed_forward(layers[i], *pass, i);
    }
}

// out[rows, outputs]: the normalised rows times the matrix.
void ds_head(const ds::Norm* norm, const ds::Matrix* matrix, const float* x, int64_t rows, float* out, int threads) {
    std::vector<float> normed(static_cast<size_t>(rows * matrix->inputs));
    ds::between().norm(*norm, x, normed.data(), rows, matrix->inputs);
    ds::Input input;
    input.prepare(normed.data(), rows, matrix->inputs, matrix->form);
    ds::multiply(*matrix, input, out, matrix->outputs, false, threads);
}

// out[count, inputs]: rows of the matrix in fp32; integers are rounded to `kind` first.
void ds_rows(const ds::Matrix* matrix, const int64_t* rows, int64_t count, ds::Kind kind, float* out) {
    for (int64_t i = 0; i < count; i++) ds::read_row(*matrix, rows[i], kind, out + i * matrix->inputs);
}

// out[rows]: index of each row's (first) largest value; -1 if it is not finite.
void ds_largest(const float* x, int64_t rows, int64_t columns, int64_t* out) {
    for (int64_t row = 0; row < rows; row++) out[row] = ds::between().largest(x + row * columns, columns);
}

void ds_attend(const ds::Pass* pass, const ds::Heads* heads, const float* queries, float* out) {
    ds::attend(*pass, *heads, queries, heads->count * heads->size, out);
}
}
