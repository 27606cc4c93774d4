#include "tessera/comm/backends/mpi/mpi_meet.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <set>
#include <thread>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

namespace {

using Clock = std::chrono::steady_clock;

/// Tests until all requests are complete or the deadline has passed; returns which are complete.
std::vector<bool> test_until(std::vector<MPI_Request>& requests, MpiLibrary& library,
                             Deadline deadline) {
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

/// What members tell the first one, and get back: a hash of the list of ranks; kRefused instead if
/// a member came with another list.
constexpr std::uint64_t kRefused = 0;

std::uint64_t hash_of(const std::vector<int>& ranks) {
  Hash hash;
  for (const int r : ranks) hash.number(static_cast<std::uint64_t>(r));
  return hash.value() | 1;
}

/// Returns once every member has come with the same list. The first member collects a message from
/// each and answers; both sides know in time which ranks are missing.
void meet(MpiContext& context, const std::vector<int>& ranks, int tag,
          const MpiBackendOptions& options) {
  const auto deadline = deadline_after(options.timeout);
  const int root = ranks.front();
  const bool is_root = context.rank() == root;
  const auto mine = hash_of(ranks);
  // MPI may still use these when a wait ran out: they are then left alive.
  auto inbox = std::make_unique<std::vector<std::uint64_t>>(ranks.size(), kRefused);
  auto outbox = std::make_unique<std::vector<std::uint64_t>>(1, mine);
  std::vector<MPI_Request> requests;
  std::vector<int> peers;
  const auto receive = [&](int from) {
    check_mpi(MPI_Irecv(inbox->data() + peers.size(), 1, MPI_UINT64_T, from, tag, context.comm(),
                        &requests.emplace_back(MPI_REQUEST_NULL)),
              "MPI_Irecv");
    peers.push_back(from);
  };
  const auto send = [&](int to) {
    check_mpi(MPI_Isend(outbox->data(), 1, MPI_UINT64_T, to, tag, context.comm(),
                        &requests.emplace_back(MPI_REQUEST_NULL)),
              "MPI_Isend");
    peers.push_back(to);
  };
  const auto finish = [&](bool answers) {
    const auto done = test_until(requests, *context.library(), deadline);
    std::vector<int> missing;
    for (std::size_t i = 0; i < done.size(); ++i)
      if (!done[i]) missing.push_back(peers[i]);
    if (missing.empty()) return;
    context.library()->set_broken();
    [[maybe_unused]] const auto* const kept = std::pair(inbox.release(), outbox.release()).first;
    throw TimeoutError(
        concat("group '", options.name, "' of ranks ", list(ranks), ": after ",
               options.timeout.count(), " ms ",
               !is_root  ? concat("its first rank ", root, " has not seen all members")
               : answers ? concat("ranks ", list(missing), " do not take the answer")
                         : concat("ranks ", list(missing), " have not come"),
               "; every member, and no other rank, must make the group"),
        is_root ? missing : std::vector<int>());
  };
  {
    const auto lock = context.library()->serialize();
    if (is_root) {
      for (const int r : ranks)
        if (r != root) receive(r);
    } else {
      receive(root);
      send(root);
    }
  }
  finish(false);
  bool alike = true;
  std::vector<int> others;
  for (std::size_t i = 0; i + 1 < inbox->size(); ++i) {
    if ((*inbox)[i] == mine || (!is_root && i > 0)) continue;
    alike = false;
    others.push_back(peers[i]);
  }
  if (is_root) {
    requests.clear();
    peers.clear();
    outbox->front() = alike ? mine : kRefused;
    {
      const auto lock = context.library()->serialize();
      for (const int r : ranks)
        if (r != root) send(r);
    }
    finish(true);
  }
  if (!alike)
    throw MismatchError(
        concat("group '", options.name, "' of ranks ", list(ranks), ": ",
               is_root ? concat("ranks ", list(others), " make another group at this point")
                       : concat("its first rank ", root, " met ranks that make another group"),
               "; make groups that share ranks in the same order on all of them"));
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
    throw InvalidArgument(concat("MPI group of ranks ", list(ranks), ": a rank is listed twice"));
  if (std::find(ranks.begin(), ranks.end(), context->rank()) == ranks.end())
    throw InvalidArgument(concat("MPI group of ranks ", list(ranks), " was made on rank ",
                                 context->rank(), ", which is no member"));
  // Every MPI library has tags up to 32767.
  const int tag = static_cast<int>(hash_of(ranks) % 32767);
  if (ranks.size() > 1) meet(*context, ranks, tag, options);
  MPI_Group everybody = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(context->comm(), &everybody), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(everybody, static_cast<int>(ranks.size()), ranks.data(), &members),
            "MPI_Group_incl");
  MPI_Comm comm = MPI_COMM_NULL;
  // All members are here; MPI_Comm_create_group cannot be interrupted.
  const auto slot = std::make_shared<BlockingSlot>();
  slot->who = concat("rank ", context->rank(), " in group '", options.name, "'");
  context->library()->watchdog().add(slot);
  const int code = [&] {
    const BlockingPhase phase(*slot, "making the group", bounded_limit(options.timeout).count());
    return MPI_Comm_create_group(context->comm(), members, tag, &comm);
  }();
  MPI_Group_free(&members);
  MPI_Group_free(&everybody);
  check_mpi(code, "MPI_Comm_create_group");
  return std::make_shared<MpiComm>(context, comm, ranks, options.name,
                                   bounded_limit(options.timeout));
}

}  // namespace tessera::detail
