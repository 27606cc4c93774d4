#pragma once
// Independent pieces of work, spread over a few threads for the length of one call.

#include <cstddef>
#include <functional>

namespace tessera::detail {

/// How many threads one of `ranks` ranks takes where the user asks for `asked`; 0: its share of the
/// cores that this process may use, at most 4. Throws InvalidArgument for a negative number.
int threads_of_rank(int asked, int ranks);

/// Calls work(i, worker) for each i below `count` on up to `threads` threads, the caller's among
/// them: `worker` numbers the thread, from 0 on. Where the system starts no thread, those that are
/// there do the work. After an exception no further calls begin; one of them is thrown.
void spread(int threads, std::size_t count,
            const std::function<void(std::size_t i, std::size_t worker)>& work);

}  // namespace tessera::detail
