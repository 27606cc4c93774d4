// How the members of a new MPI group meet.

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/pinned.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi_work.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

/// What a message of a meeting says; the last bits of `group`, the other ones of which say which
/// group is made.
enum class Says : unsigned char {
  /// A member to the first one: it has come.
  hello = 1,
  /// The first one to a member: all have come, do you still take part?
  ask = 2,
  /// The answer: it does, and waits for the decision for `left_ms`.
  consent = 3,
  /// The first one to a member: all go on.
  go = 4,
  /// A member has come with another list of ranks.
  refuse = 5,
  /// This rank has given the group up.
  give_up = 6,
  /// The time is over: a member's, which waits no more, or the first one's, in whose next try the
  /// member may go on.
  late = 7,
};

/// A message of a meeting. Each call that meets has a number of its own in its process, a try, so
/// that what a try has left behind is not taken for a message of another one.
struct Note {
  std::uint64_t group = 0;
  /// The sender's try, and the receiver's, as far as the sender knows it.
  std::uint64_t from = 0, to = 0;
  std::uint64_t left_ms = 0;

  Says says() const { return static_cast<Says>(group & 7); }
};
constexpr int kNumbers = sizeof(Note) / sizeof(std::uint64_t);

std::uint64_t hash_of(const std::vector<int>& ranks, std::uint64_t attempt) {
  Hash hash;
  for (const int r : ranks) hash.number(static_cast<std::uint64_t>(r));
  if (attempt != 0) hash.number(attempt);
  return hash.value();
}

bool is_past(Deadline deadline) { return Clock::now() > deadline; }

/// Notes between this rank and others that neither blocks.
class Post : Pinned {
 public:
  Post(MpiContext& context, int tag) : context_(context), tag_(tag) {}
  /// Takes back the receives. What MPI may still read or write stays alive.
  ~Post() {
    const auto lock = context_.library()->serialize();
    for (auto& [rank, in] : inbox_) cancel(in);
    for (auto& out : outbox_) {
      if (ended(*out)) continue;
      MPI_Request_free(&out->request);
      [[maybe_unused]] const auto* const kept = out.release();
    }
  }

  /// Begins to wait for a note of this rank.
  void expect(int rank) {
    auto& in = inbox_[rank];
    if (!in) in = std::make_unique<Slot>();
    in->note = {};
    const auto lock = context_.library()->serialize();
    check_mpi(
        MPI_Irecv(&in->note, kNumbers, MPI_UINT64_T, rank, tag_, context_.comm(), &in->request),
        "MPI_Irecv");
  }
  /// The note of a rank that is expected, if it has come; then none is expected of that rank.
  std::optional<Note> take(int rank) {
    auto& in = *inbox_.at(rank);
    if (in.request == MPI_REQUEST_NULL || !is_over(in)) return std::nullopt;
    return in.note;
  }
  /// Takes back the receive of a rank. The note that had come before that, if any; without it the
  /// note would be lost.
  std::optional<Note> withdraw(int rank) {
    const auto found = inbox_.find(rank);
    if (found == inbox_.end()) return std::nullopt;
    const auto lock = context_.library()->serialize();
    return cancel(found->second);
  }
  void send(int rank, const Note& note) {
    auto out = std::make_unique<Slot>();
    out->note = note;
    const auto lock = context_.library()->serialize();
    check_mpi(
        MPI_Isend(&out->note, kNumbers, MPI_UINT64_T, rank, tag_, context_.comm(), &out->request),
        "MPI_Isend");
    outbox_.push_back(std::move(out));
  }
  /// True if MPI has taken all that was sent.
  bool sent() {
    std::erase_if(outbox_, [this](const auto& out) { return is_over(*out); });
    return outbox_.empty();
  }
  /// Between two looks at what has come: other calls of this process go on.
  void pause() {
    context_.library()->drive();
    if (++looks_ < 1000)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(200));
  }

 private:
  struct Slot {
    Note note;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  bool is_over(Slot& slot) {
    const auto lock = context_.library()->serialize();
    return mpi_test(slot.request, "MPI_Test");
  }
  /// As is_over(), for the end: with the lock held, and an error counts as no end.
  static bool ended(Slot& slot, MPI_Status* status = MPI_STATUS_IGNORE) noexcept {
    int done = 0;
    return MPI_Test(&slot.request, &done, status) == MPI_SUCCESS && done != 0;
  }
  /// As withdraw(), with the lock held.
  std::optional<Note> cancel(std::unique_ptr<Slot>& in) noexcept {
    if (!in || in->request == MPI_REQUEST_NULL) return std::nullopt;
    MPI_Cancel(&in->request);
    MPI_Status status;
    if (!ended(*in, &status)) {
      context_.library()->set_broken();
      [[maybe_unused]] const auto* const kept = in.release();
      return std::nullopt;
    }
    int cancelled = 1;
    MPI_Test_cancelled(&status, &cancelled);
    return cancelled ? std::nullopt : std::optional(in->note);
  }

  MpiContext& context_;
  const int tag_;
  std::map<int, std::unique_ptr<Slot>> inbox_;
  std::vector<std::unique_ptr<Slot>> outbox_;
  int looks_ = 0;
};

/// How the members meet, before MPI_Comm_create_group, in which nothing can be given up any more.
/// All report to the first one; when all have come it asks each whether it still takes part, and
/// who consents gives up no more by itself; when all have consented in time, the first one tells
/// them to go on. So either all go on or none, although each may hear at another time that the
/// group is given up (two-phase commit).
///
/// The time of each rank is its own: when that of the first one is over, the others wait on for its
/// next try, and a member may report again, in a new try, while the first one is still in an old
/// one. A member reports once in a try, so that no report may be lost: those that the first one has
/// heard, and that are not over when its try ends, are kept for its next one.
class Meeting {
 public:
  Meeting(MpiContext& context, const std::vector<int>& ranks, int tag,
          const MpiBackendOptions& options, const MpiAttempt& attempt)
      : context_(context),
        ranks_(ranks),
        options_(options),
        attempt_(attempt),
        deadline_(deadline_after(options.timeout)),
        group_(hash_of(ranks, attempt.number) & ~std::uint64_t{7}),
        try_(context.next_try()),
        post_(context, tag) {}

  /// Returns once every member has come with the same list. Throws what make_mpi_comm() throws.
  void run() {
    if (context_.rank() != ranks_.front()) return follow();
    try {
      lead();
    } catch (...) {
      keep_reports();
      throw;
    }
  }

 private:
  /// What the first member knows of another one.
  struct Member {
    int rank = 0;
    /// Its last try that is known, and the group that it makes in it.
    std::uint64_t its_try = 0, group = 0;
    bool came = false, consents = false;
    /// How many of its tries have been heard of in this try of the first one.
    int tries = 0;
  };

  void lead() {
    for (std::size_t i = 1; i < ranks_.size(); ++i) {
      const int rank = ranks_[i];
      members_.push_back({.rank = rank});
      if (const auto its_try = context_.reports().take(group_, rank))
        note_hello(members_.back(), {.group = group_, .from = its_try});
    }
    for (const Member& member : members_) post_.expect(member.rank);
    const auto all = [&](bool Member::* is) {
      return std::ranges::all_of(members_, [is](const auto& m) { return m.*is; });
    };
    bool asked = false;
    Clock::time_point asked_at, latest = Clock::time_point::max();
    for (;; post_.pause()) {
      for (Member& member : members_) {
        const auto note = post_.take(member.rank);
        if (!note) continue;
        hear(member, *note, asked, asked_at, latest);
        if (!member.consents) post_.expect(member.rank);
      }
      if (!asked && all(&Member::came)) {
        require_alike();
        asked = true;
        asked_at = Clock::now();
        tell(Says::ask);
      }
      const bool ready = asked && all(&Member::consents);
      if (ready && Clock::now() < latest) break;
      if (!ready && gives_up()) {
        end_tries(Says::give_up);
        give_up();
      }
      if (ready || is_past(deadline_)) {
        tell(Says::late);
        miss(asked);
      }
    }
    tell(Says::go);
    // All have been told, or will be: who has consented is reading.
    const auto enough = deadline_after(std::chrono::seconds(10));
    while (!post_.sent() && !is_past(enough)) post_.pause();
  }

  static void note_hello(Member& member, const Note& note) {
    member = {.rank = member.rank,
              .its_try = note.from,
              .group = note.group & ~std::uint64_t{7},
              .came = true,
              .tries = member.tries + 1};
  }

  /// A note of a member to the first one. A consent holds for a time after the question at least.
  void hear(Member& member, const Note& note, bool asked, Clock::time_point asked_at,
            Clock::time_point& latest) {
    const bool same = (note.group & ~std::uint64_t{7}) == group_;
    switch (note.says()) {
      case Says::hello:
        note_hello(member, note);
        // it has come once more
        if (asked && same) tell(member, Says::ask);
        if (asked && !same) end_try(member, Says::refuse);
        break;
      case Says::late:
        if (note.from == member.its_try) member.came = member.consents = false;
        break;
      case Says::consent:
        if (!same || note.to != try_ || note.from != member.its_try) break;
        member.consents = true;
        latest = std::min(latest, asked_at + std::chrono::milliseconds(note.left_ms));
        break;
      case Says::give_up:
        if (!same || note.from != member.its_try) break;
        member.came = false;
        member_gave_up_ = true;
        break;
      default:
        break;
    }
  }

  /// For the next try of this process to make the group; at the end of one that has failed.
  void keep_reports() noexcept try {
    for (Member& member : members_) {
      if (const auto note = post_.withdraw(member.rank)) {
        if (note->says() == Says::hello) note_hello(member, *note);
        const bool over = note->says() == Says::give_up || note->says() == Says::late;
        if (over && note->from == member.its_try) member.came = false;
      }
      if (member.came) context_.reports().keep(member.group, member.rank, member.its_try);
    }
  } catch (...) {
    // Out of memory: these members wait until their own time is over.
  }

  void follow() {
    const int first = ranks_.front();
    post_.expect(first);
    post_.send(first, {group_ | bits(Says::hello), try_, 0, 0});
    bool consents = false;
    auto until = deadline_;
    for (;; post_.pause()) {
      if (const auto note = post_.take(first)) {
        const bool mine = note->to == try_;
        if (mine && note->says() == Says::go) break;
        if (mine && note->says() == Says::give_up) give_up();
        if (mine && note->says() == Says::late) {
          consents = false;
          until = deadline_;
        }
        if (mine && note->says() == Says::refuse)
          refuse(concat("its first rank ", first, " met ranks that make another group"));
        if (mine && note->says() == Says::ask) {
          const auto left = std::max(time_left(deadline_), std::chrono::milliseconds(0));
          consents = true;
          // The first one decides before that, and its word takes a while.
          until = deadline_after(bounded_limit(left + std::chrono::seconds(2)));
          post_.send(first, {group_ | bits(Says::consent), try_, note->from,
                             static_cast<std::uint64_t>(left.count())});
        }
        post_.expect(first);
      }
      if (!consents && gives_up()) {
        post_.send(first, {group_ | bits(Says::give_up), try_, 0, 0});
        give_up();
      }
      if (is_past(until)) {
        post_.send(first, {group_ | bits(Says::late), try_, 0, 0});
        miss_the_first();
      }
    }
  }

  static std::uint64_t bits(Says says) { return static_cast<std::uint64_t>(says); }
  bool gives_up() const { return member_gave_up_ || (attempt_.given_up && attempt_.given_up()); }

  void tell(const Member& member, Says says) {
    post_.send(member.rank, {group_ | bits(says), try_, member.its_try, 0});
  }
  void tell(Says says) {
    for (const Member& member : members_)
      if (member.came) tell(member, says);
  }
  void end_try(Member& member, Says says) {
    tell(member, says);
    member.came = false;
  }
  /// Ends the tries of those that have come. Who has come again is not given up: that try is for
  /// the next one of this rank.
  void end_tries(Says says) {
    for (Member& member : members_)
      if (member.came && (member.tries == 1 || says == Says::refuse)) end_try(member, says);
  }

  void require_alike() {
    std::vector<int> different;
    for (const Member& member : members_)
      if (member.group != group_) different.push_back(member.rank);
    if (different.empty()) return;
    end_tries(Says::refuse);
    refuse(concat("ranks ", list(different), " make another group at this point"));
  }

  std::string group() const {
    return concat("group '", options_.name, "' of ranks ", list(ranks_));
  }

  [[noreturn]] void give_up() const {
    throw PeerLostError(concat(group(), " was given up before its ranks had met"), {});
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw MismatchError(group(), ": ", why,
                        "; make groups that share ranks in the same order on all of them");
  }
  [[noreturn]] void miss_the_first() const {
    throw_late(concat("its first rank ", ranks_.front(), " has not seen all members"), {});
  }
  [[noreturn]] void miss(bool asked) const {
    std::vector<int> missing;
    for (const Member& member : members_)
      if (asked ? !member.consents : !member.came) missing.push_back(member.rank);
    throw_late(missing.empty() ? "all ranks have come, but too late for one of them"
                               : concat("ranks ", list(missing),
                                        asked ? " do not answer any more" : " have not come"),
               missing);
  }
  [[noreturn]] void throw_late(const std::string& why, const std::vector<int>& missing) const {
    // The ranks are out of step: MPI's end, at which all meet, is not waited for.
    context_.library()->set_broken();
    throw TimeoutError(concat(group(), ": after ", options_.timeout.count(), " ms ", why,
                              "; every member, and no other rank, must make the group"),
                       missing);
  }

  MpiContext& context_;
  const std::vector<int>& ranks_;
  const MpiBackendOptions& options_;
  const MpiAttempt& attempt_;
  const Deadline deadline_;
  const std::uint64_t group_, try_;
  Post post_;
  std::vector<Member> members_;
  bool member_gave_up_ = false;
};

}  // namespace

std::shared_ptr<MpiComm> make_mpi_comm(const std::shared_ptr<MpiContext>& context,
                                       const std::vector<int>& ranks,
                                       const MpiBackendOptions& options,
                                       const MpiAttempt& attempt) {
  context->library()->require_thread();
  if (ranks.empty()) throw InvalidArgument("an MPI group needs at least one rank");
  for (const int r : ranks)
    if (r < 0 || r >= context->size())
      throw InvalidArgument("MPI group of ranks ", list(ranks), ": there is no rank ", r, " among ",
                            context->size());
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size())
    throw InvalidArgument("MPI group of ranks ", list(ranks), ": a rank is listed twice");
  if (std::ranges::find(ranks, context->rank()) == ranks.end())
    throw InvalidArgument("MPI group of ranks ", list(ranks), " was made on rank ", context->rank(),
                          ", which is no member");
  // Every MPI library has tags up to 32767.
  const int tag = static_cast<int>(hash_of(ranks, attempt.number) % 32767);
  if (ranks.size() > 1) Meeting(*context, ranks, tag, options, attempt).run();
  MPI_Group everybody = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(context->comm(), &everybody), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(everybody, static_cast<int>(ranks.size()), ranks.data(), &members),
            "MPI_Group_incl");
  MPI_Comm comm = MPI_COMM_NULL;
  // All members are here; MPI_Comm_create_group cannot be interrupted.
  const auto slot = context->library()->watchdog().watch(
      concat("rank ", context->rank(), " in group '", options.name, "'"));
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
