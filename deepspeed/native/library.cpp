// Functions for the loader: the fingerprint of this library's sources, and the instruction set of its kernels.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <new>

#include "numbers.h"

#if defined(__GLIBCXX__) && _GLIBCXX_RELEASE >= 11
// Error function of containers for impossible sizes. Since GCC 11 this is a function of the newest libstdc++, the only
// one that this library would need. With its own definition, the library loads wherever torch's wheels do.
namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}
#endif

namespace ds {

#if defined(__x86_64__)
// Integer products, bf16 pair products, then AMX tiles, which a process must request from Linux.
static InstructionSet beyond_avx512() {
    uint32_t a, b, c, d, pairs = 0;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) pairs = a >> 5 & 1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 11 & 1)) return AVX512;
    if (!pairs) return AVX512_VNNI;
    const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return tiles && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? AMX : AVX512_BF16;
}
#endif

static InstructionSet able() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return beyond_avx512();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

// Intel's bf16 pair product takes four times as long as an fp32 multiply-add, which does half as many products.
static InstructionSet best() {
    const InstructionSet set = able();
#if defined(__x86_64__)
    if (set == AVX512_BF16 && __builtin_cpu_is("intel")) return AVX512_VNNI;
#endif
    return set;
}

static InstructionSet chosen = best();

InstructionSet instruction_set() { return chosen; }

}  // namespace ds

extern "C" {

// DS_FINGERPRINT comes from setup.py.
uint32_t ds_fingerprint() { return DS_FINGERPRINT; }

// Use the processor's best instruction set, but at most `highest`; returns the one in use.
int32_t ds_instruction_set(int32_t highest) {
    const ds::InstructionSet able = ds::able();
    if (highest > ds::AMX) ds::chosen = ds::best();
    else ds::chosen = highest < able ? static_cast<ds::InstructionSet>(highest) : able;
    return ds::chosen;
}

}
