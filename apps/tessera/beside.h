#pragma once
// Programs that stand beside this one: they link libtorch, `tessera` does not.

#include <string>
#include <vector>

namespace tessera::app {

/// Becomes the program `name` in this program's folder. Throws NotAvailable, with the target to
/// build, if there is none.
[[noreturn]] void become(const std::string& name, const std::string& target,
                         const std::vector<std::string>& arguments);

}  // namespace tessera::app
