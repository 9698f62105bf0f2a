// Sums of several contributions in rank order, each term and the sum in fp32.
#pragma once

#include "numbers.h"

namespace ds {

// out (+)= scale * (parts[0] + parts[1] + ...); `out` may be one of the contributions.
void sum(const void* const* parts, int count, uint64_t n, Kind kind, void* out, Kind out_kind, float scale, bool add);

}  // namespace ds
