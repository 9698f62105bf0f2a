// One translation unit: torch's headers cost more than all of these together.
#include "memory.cpp"
#include "streams.cpp"
#include "operators.cpp"
#include "graphs.cpp"
#include "nccl.cpp"
#include "module.cpp"
