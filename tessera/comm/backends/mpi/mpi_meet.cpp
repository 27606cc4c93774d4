#include "tessera/comm/backends/mpi/mpi_meet.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

namespace {

using Clock = std::chrono::steady_clock;

/// Tests until all requests are done or the deadline has passed; gives which are done.
std::vector<bool> test_until(std::vector<MPI_Request>& requests, MpiLibrary& library,
                             Clock::time_point deadline) {
  std::vector<bool> done(requests.size(), false);
  for (int i = 0;; ++i) {
    bool all = true;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      if (done[r]) continue;
      const auto lock = library.serialize();
      int flag = 0;
      check_mpi(MPI_Test(&requests[r], &flag, MPI_STATUS_IGNORE), "MPI_Test");
      done[r] = flag != 0;
      all = all && flag;
    }
    if (all || Clock::now() > deadline) return done;
    if (i < 1000)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

/// Returns once every member has come. The first member collects a message from each and answers;
/// both sides know in time who is missing.
void meet(MpiContext& context, const std::vector<int>& ranks, int tag,
          const MpiBackendOptions& options) {
  const auto deadline = deadline_after(options.timeout);
  const int root = ranks.front();
  // MPI may still write here when a wait ran out: shared with nobody, and left alive in that case.
  auto inbox = std::make_unique<std::vector<char>>(ranks.size());
  std::vector<MPI_Request> requests;
  std::vector<int> peers;
  const auto receive = [&](int from) {
    peers.push_back(from);
    check_mpi(MPI_Irecv(inbox->data() + requests.size(), 1, MPI_CHAR, from, tag, context.comm(),
                        &requests.emplace_back(MPI_REQUEST_NULL)),
              "MPI_Irecv");
  };
  static const char hello = 1;
  const auto send = [&](int to) {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Isend(&hello, 1, MPI_CHAR, to, tag, context.comm(), &request), "MPI_Isend");
    check_mpi(MPI_Request_free(&request), "MPI_Request_free");
  };
  {
    const auto lock = context.library()->serialize();
    if (context.rank() == root) {
      for (const int r : ranks)
        if (r != root) receive(r);
    } else {
      send(root);
      receive(root);
    }
  }
  const auto done = test_until(requests, *context.library(), deadline);
  std::vector<int> missing;
  for (std::size_t i = 0; i < done.size(); ++i)
    if (!done[i]) missing.push_back(peers[i]);
  if (!missing.empty()) {
    context.library()->set_broken();
    inbox.release();
    const bool is_root = context.rank() == root;
    throw TimeoutError(
        concat("group '", options.name, "' of ranks ", list(ranks), ": after ",
               options.timeout.count(), " ms ",
               is_root ? concat("ranks ", list(missing), " have not come")
                       : concat("its first rank ", root, " has not seen all members"),
               "; every member, and no other rank, must make the group"),
        is_root ? missing : std::vector<int>());
  }
  if (context.rank() == root) {
    const auto lock = context.library()->serialize();
    for (const int r : ranks)
      if (r != root) send(r);
  }
}

}  // namespace

std::shared_ptr<MpiComm> make_mpi_comm(const std::shared_ptr<MpiContext>& context,
                                       const std::vector<int>& ranks,
                                       const MpiBackendOptions& options) {
  context->library()->require_thread();
  if (ranks.empty()) throw InvalidArgument("an MPI group needs at least one rank");
  for (const int r : ranks)
    if (r < 0 || r >= context->size())
      throw InvalidArgument(concat("MPI group of ranks ", list(ranks), ": there is no rank ", r,
                                   " among ", context->size()));
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size())
    throw InvalidArgument(concat("MPI group of ranks ", list(ranks), ": a rank comes twice"));
  if (std::find(ranks.begin(), ranks.end(), context->rank()) == ranks.end())
    throw InvalidArgument(concat("MPI group of ranks ", list(ranks), " was made on rank ",
                                 context->rank(), ", which is no member"));
  Hash hash;
  for (const int r : ranks) hash.number(static_cast<std::uint64_t>(r));
  // Every MPI library has tags up to 32767.
  const int tag = static_cast<int>(hash.value() % 32767);
  if (ranks.size() > 1) meet(*context, ranks, tag, options);
  MPI_Group everybody = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(context->comm(), &everybody), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(everybody, static_cast<int>(ranks.size()), ranks.data(), &members),
            "MPI_Group_incl");
  MPI_Comm comm = MPI_COMM_NULL;
  const int code = MPI_Comm_create_group(context->comm(), members, tag, &comm);
  MPI_Group_free(&members);
  MPI_Group_free(&everybody);
  check_mpi(code, "MPI_Comm_create_group");
  return std::make_shared<MpiComm>(context, comm, ranks, options.name);
}

}  // namespace tessera::detail
