#pragma once
// Functions of Python's that the library calls, by address: without Python's headers such a call
// takes numbers alone, and tensors go by the operators taken(), deliver() and refuse(), which the
// function calls before it returns.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tessera::python {

/// A function of Python's. It returns 1 if it has delivered, 0 where there is nothing (the end of a
/// stream), and -1 after an exception, whose text it has handed over.
using PythonFunction = int (*)(const std::uint64_t* numbers, std::uint64_t count);

/// What `function` delivers of these numbers and `given`; nothing where there is nothing. Runs on
/// this thread, which takes the interpreter's lock for it. Throws what the function has refused
/// with: a CommError of its class, else an Error.
std::optional<std::vector<at::Tensor>> ask(PythonFunction function,
                                           std::span<const std::uint64_t> numbers,
                                           const std::vector<at::Tensor>& given = {});

}  // namespace tessera::python
