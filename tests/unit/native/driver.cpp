// Runs every rule on every kind of element over fixed data and prints a hash of all that it wrote.
#include <cmath>
#include <cstdio>
#include <vector>

#include "numbers.h"

struct Leaf {
    int64_t count;
    void *param, *gradient, *first, *second, *out;
    int32_t param_kind, gradient_kind, first_kind, second_kind, out_kind;
    float factor;
};

extern "C" {
void ds_adam(const Leaf*, const float*, int);
void ds_adagrad(const Leaf*, const float*, int);
void ds_lion(const Leaf*, const float*, int);
void ds_sums_of_squares(const void* const*, int32_t, const int64_t*, int64_t, int, double*);
}

using Buffer = std::vector<unsigned char>;

static Buffer values(int64_t count, int32_t kind, uint32_t seed, bool positive) {
    Buffer buffer(static_cast<size_t>(count) * 4);
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        float value = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
        if (positive) value = std::fabs(value);
        if (kind == 0) std::memcpy(&buffer[static_cast<size_t>(i) * 4], &value, 4);
        const uint16_t half = kind == 1 ? ds::to_bf16(value) : ds::to_fp16(value);
        if (kind != 0) std::memcpy(&buffer[static_cast<size_t>(i) * 2], &half, 2);
    }
    return buffer;
}

static uint32_t hash(const Buffer& buffer, uint32_t so_far) {
    for (unsigned char byte : buffer) so_far = (so_far ^ byte) * 16777619u;
    return so_far;
}

int main() {
    const float adam[] = {0.1f, 0.999f, 0.001f, 0.01f, 0.05f, 1e-8f, 0.999f, 0.01f};
    const float adagrad[] = {0.01f, 1e-10f, 0.1f};
    const float lion[] = {0.01f, 0.1f, 0.01f, 0.999f};
    const int64_t count = 100003;
    for (int32_t param_kind = 0; param_kind < 3; param_kind++)
        for (int32_t kind = 0; kind < 3; kind++) {
            for (int rule = 0; rule < 3; rule++) {
                Buffer param = values(count, param_kind, 1, false), gradient = values(count, kind, 2, false);
                Buffer first = values(count, kind, 3, rule == 1), second = values(count, 0, 4, true);
                Buffer out(count * 2);
                const int32_t out_kind = kind == 2 ? 2 : 1;
                Leaf leaf{count, param.data(), gradient.data(), first.data(), rule ? nullptr : second.data(),
                          out.data(), param_kind, kind, kind, 0, out_kind, 0.37f};
                if (rule == 0) ds_adam(&leaf, adam, 2);
                if (rule == 1) ds_adagrad(&leaf, adagrad, 2);
                if (rule == 2) ds_lion(&leaf, lion, 2);
                const uint32_t all = hash(out, hash(second, hash(first, hash(param, 2166136261u))));
                std::printf("rule %d param %d gradient %d: %08x\n", rule, param_kind, kind, all);
            }
            if (param_kind == 0) {
                Buffer summed = values(count, kind, 5, false);
                const void* base = summed.data();
                const int64_t numel = count;
                double squares = 0.0;
                ds_sums_of_squares(&base, kind, &numel, 1, 2, &squares);
                std::printf("norm %d: %.17g\n", kind, squares);
            }
        }
}
