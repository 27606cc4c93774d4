#pragma once
// Which memory allocator the ranks of a run use.

#include <string>
#include <utility>
#include <vector>

namespace tessera::detail {

/// The variables, with their values, by which a program that is started with them uses
/// LocalRun::allocator; `inherited` gives the present value of a variable, which ours are added to.
/// Throws InvalidArgument for a choice that does not exist and a file that the programs of this
/// machine cannot load, and NotAvailable for "keep" where the C library is not glibc.
std::vector<std::pair<std::string, std::string>> allocator_variables(
    const std::string& choice, const std::vector<std::string>& inherited);

}  // namespace tessera::detail
