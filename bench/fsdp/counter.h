#pragma once
// Bytes of tensors of a process, on whichever thread they are allocated, counted at libtorch's CPU
// allocator: the same code in ranks of C++ and, loaded by ctypes, of Python. Plain C.

#include <cstdint>

extern "C" {

/// Counts what is allocated from now on. Once, before the first tensor.
void bench_counter_install();
/// The most from here on; what lives counts.
void bench_counter_restart();
/// The most bytes that lived at a time since then.
std::int64_t bench_counter_bytes();
}
