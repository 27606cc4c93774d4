#pragma once
// Slurm's short forms of host names and of task counts.

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Expands a list of host names, in the order of the list. Commas or blanks separate names,
/// brackets hold numbers and ranges (a range keeps the width of its first number), several brackets
/// in one name give their product, the last one fastest. Throws ConfigurationError for anything
/// else.
///
///   alpha[3,1],beta          alpha3 alpha1 beta
///   1.2.3.[089, 100-101]     1.2.3.089 1.2.3.100 1.2.3.101
///   r[1-2]n[08-09]-ib        r1n08-ib r1n09-ib r2n08-ib r2n09-ib
std::vector<std::string> expand_node_list(std::string_view text);

/// Expands the number of tasks of each node: "1(x2),3,4(x3)" is {1, 1, 3, 4, 4, 4}. Throws
/// ConfigurationError for anything else.
std::vector<int> expand_task_counts(std::string_view text);

}  // namespace tessera
