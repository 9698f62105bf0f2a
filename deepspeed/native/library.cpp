// What the loader asks: from which sources this library was built, and which instruction set its kernels use.
#include "numbers.h"

namespace ds {

static InstructionSet best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

static InstructionSet chosen = best();

InstructionSet instruction_set() { return chosen; }

}  // namespace ds

extern "C" {

// DS_FINGERPRINT comes from setup.py.
uint32_t ds_fingerprint() { return DS_FINGERPRINT; }

// Use at most `highest`; returns what is in use.
int32_t ds_instruction_set(int32_t highest) {
    const ds::InstructionSet best = ds::best();
    ds::chosen = highest < best ? static_cast<ds::InstructionSet>(highest) : best;
    return ds::chosen;
}

}
