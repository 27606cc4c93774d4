#include "tessera/comm/store/detail/store_connection.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <system_error>

#include "tessera/base/text.h"
#include "tessera/comm/store/detail/secret_file.h"
#include "tessera/comm/store/store.h"

namespace tessera::detail {
namespace {

// The server answers for all ranks; this much later a rank gives up by itself.
constexpr std::chrono::milliseconds server_grace{700};

std::string me() {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return concat("process ", getpid(), " on ", host);
}

/// Receives a frame of at most `largest` bytes; empty on anything else.
std::string receive_frame(const Socket& socket, Deadline deadline, std::size_t largest,
                          Transfer& how) {
  std::uint32_t size = 0;
  how = receive_all(socket, &size, sizeof size, deadline);
  if (how != Transfer::done) return {};
  if (size < 9 || size > largest) {
    how = Transfer::closed;
    return {};
  }
  std::string frame(size, '\0');
  how = receive_all(socket, frame.data(), size, deadline);
  return how == Transfer::done ? frame : std::string();
}

[[noreturn]] void throw_foreign(const Hello& hello, const std::string& what) {
  throw RendezvousError(
      concat("something else than this job's store listens on ", hello.where, ": ", what,
             "; give address and port of rank 0, and a port that no other program uses"));
}

constexpr auto kEarlier = "it is of an earlier meeting, whose last ranks have not left";
constexpr auto kEnded = "it ended during the rendezvous; see what rank 0, which serves it, says";

/// The secret to prove; nullopt if its file does not exist.
std::optional<Secret> secret_for(const Hello& hello, std::string_view name) {
  // A rank that has no secret yet holds one without a name: no store may ask for that.
  if (!name.empty() && name == hello.secret.name) return hello.secret;
  const bool by_file = is_secret_file_name(name);
  if (by_file && hello.secret.name.empty()) {
    auto value = read_secret_file(std::string(name));
    if (!value) return std::nullopt;
    return Secret{std::string(name), std::move(*value)};
  }
  const auto said = [](std::string_view which) {
    return which == "given"     ? "was given the job's secret"
           : which == kNoSecret ? "was told that the job has no secret"
           : which == "agent"   ? "takes the job's secret from the store of torchrun's agent"
                                : "was not given the job's secret";
  };
  throw RendezvousError(concat(
      "rank ", hello.rank, " ", said(hello.secret.name), ", but what listens on ", hello.where, " ",
      by_file || name == "given" || name == "agent" || name == kNoSecret ? said(name)
                                                                         : "speaks of another one",
      "; set TESSERA_SECRET to the same text on every rank, or on none"));
}

/// What both ends send before they know each other.
struct Challenge {
  bool complete = false;
  std::string name, nonce;
};

/// The store's challenge; nullopt if the store ended, with the reason in `why`.
std::optional<Challenge> receive_challenge(const Socket& socket, const Hello& hello,
                                           Deadline deadline, std::int64_t limit,
                                           std::string& why) {
  // The server greets at once, whichever ranks are missing.
  char magic[store_magic.size()];
  std::size_t got = 0;
  Transfer how = receive_all(socket, magic, sizeof magic, deadline, &got);
  const std::string_view heard(magic, got);
  if (heard != store_magic.substr(0, got))
    throw_foreign(hello, concat("it said '", printable(heard, 24), "'"));
  std::string frame;
  if (how == Transfer::done) frame = receive_frame(socket, deadline, largest_stranger, how);
  if (how == Transfer::closed) {
    why = "what listens there accepts connections and closes them";
    return std::nullopt;
  }
  if (how == Transfer::late)
    throw_foreign(hello, concat("it accepted the connection and was silent for ", limit, " ms"));
  try {
    Reader in(frame);
    Challenge challenge;
    challenge.complete = in.number<std::uint8_t>() != 0;
    challenge.name = in.text();
    challenge.nonce = in.text();
    if (in.kind == Frame::challenge && !challenge.name.empty() && challenge.nonce.size() == 32)
      return challenge;
  } catch (const std::out_of_range&) {  // reported below
  }
  throw_foreign(hello, "it speaks another version of the protocol");
}

/// Receives the store's `proof`, then, when all ranks are there, its answer. False if the store
/// ended or is of an earlier meeting, with the reason in `why`.
bool all_are_there(const Socket& socket, const Hello& hello, Deadline deadline, std::int64_t limit,
                   const Challenge& challenge, const std::string& proof, std::string& why) {
  for (bool proven = false;;) {
    Transfer how;
    const std::string frame = receive_frame(socket, deadline + server_grace,
                                            proven ? largest_frame : largest_stranger, how);
    if (how == Transfer::late)
      throw RendezvousError(concat("rank ", hello.rank, ": the job's store on ", hello.where,
                                   " fell silent during the rendezvous (limit ", limit,
                                   " ms); rank 0, which serves it, may be stopped"),
                            {0});
    if (how == Transfer::closed) {
      why = kEnded;
      return false;
    }
    Reader in(frame);
    if (in.kind == Frame::refused) {
      if (!proven && challenge.complete) {
        why = kEarlier;
        return false;
      }
      const std::string text = printable(in.text(), 4000);
      const auto ranks = in.numbers<std::vector<int>>();
      throw RendezvousError(
          concat("rank ", hello.rank, ", rendezvous on ", hello.where, ": ", text),
          proven ? ranks : std::vector<int>());
    }
    if (!proven) {
      if (in.kind != Frame::welcome || !same_proof(in.text(), proof))
        throw_foreign(hello, "it does not know the job's secret");
      proven = true;
      continue;
    }
    if (in.kind == Frame::retry) {
      why = kEarlier;
      return false;
    }
    if (in.kind != Frame::ready) throw_foreign(hello, "it speaks another version of the protocol");
    return true;
  }
}

}  // namespace

std::shared_ptr<StoreConnection> StoreConnection::meet(Socket socket, const Hello& hello,
                                                       Deadline deadline, std::string& why,
                                                       bool* no_secret) {
  const std::int64_t limit = std::max<std::int64_t>(1, time_left(deadline).count());
  if (no_secret) *no_secret = false;
  send_all(socket, store_magic.data(), store_magic.size(), deadline);
  const auto challenge = receive_challenge(socket, hello, deadline, limit, why);
  if (!challenge) return nullptr;
  std::optional<Secret> secret;
  try {
    secret = secret_for(hello, challenge->name);
  } catch (const RendezvousError&) {
    if (!challenge->complete) throw;
  }
  if (!secret) {
    why = challenge->complete
              ? std::string(kEarlier)
              : concat("the file '", printable(challenge->name, 40),
                       "' with the job's secret is in none of ", secret_folders(),
                       ": what listens there is another user's, or the ranks share no folder; set "
                       "TESSERA_SECRET to the same text on every rank");
    if (no_secret) *no_secret = !challenge->complete;
    return nullptr;
  }
  const auto who = me().substr(0, longest_name), job = hello.job.substr(0, longest_name);
  const std::string nonce = new_secret();
  Writer mine = hello_fields(hello.rank, hello.world_size, limit, who, job, nonce);
  const std::string fields = Writer(mine).take();
  const std::string said = mine.text(rank_proof(*secret, challenge->nonce, fields)).take();
  send_all(socket, said.data(), said.size(), deadline);

  if (!all_are_there(socket, hello, deadline, limit, *challenge,
                     store_proof(*secret, challenge->nonce, fields), why))
    return nullptr;
  std::shared_ptr<StoreConnection> connection(new StoreConnection(std::move(socket), hello));
  try {
    connection->reader_ = std::thread([raw = connection.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    throw RendezvousError(
        concat("rank ", hello.rank, ": the system starts no thread for the job's store: ",
               error.what(), "; raise the limit of this host (ulimit -u)"),
        {hello.rank});
  }
  return connection;
}

StoreConnection::~StoreConnection() {
  leave();
  // The server closes once it has read that this rank leaves. Closing first, with news unread,
  // would reset the connection, and that frame could be lost with it.
  ::shutdown(socket_.fd(), SHUT_WR);
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(1), [this] { return !gone_.empty(); });
  }
  ::shutdown(socket_.fd(), SHUT_RDWR);  // ends the reader, if the server is stopped
  if (reader_.joinable()) reader_.join();
}

void StoreConnection::forget(const std::string& prefix, std::size_t size,
                             const std::vector<int>& members) noexcept {
  if (left_) return;
  try {
    send(Writer(Frame::forget)
             .text(prefix)
             .number(static_cast<std::uint32_t>(size))
             .numbers(members)
             .take(),
         Clock::now() + std::chrono::milliseconds(200));
  } catch (...) {  // the store is gone, and the keys with it
  }
}

void StoreConnection::leave() noexcept {
  if (left_.exchange(true)) return;
  try {
    send(Writer(Frame::leave).take(), Clock::now() + std::chrono::seconds(1));
  } catch (...) {  // the store is gone already
  }
}

void StoreConnection::disconnect() noexcept { ::shutdown(socket_.fd(), SHUT_RDWR); }

void StoreConnection::send(const std::string& frame, Deadline deadline) {
  const std::lock_guard lock(send_mutex_);
  const Transfer how = send_all(socket_, frame.data(), frame.size(), deadline);
  if (how == Transfer::done) return;
  // Half a frame may have been sent: the connection cannot be used any more.
  if (how == Transfer::late) ::shutdown(socket_.fd(), SHUT_RDWR);
  C10_THROW_ERROR(
      DistStoreError,
      concat("rank ", hello_.rank, ": the job's store on ", hello_.where,
             " accepts no calls any more (rank 0, which serves it, has ended or is stopped)"));
}

std::string StoreConnection::call(Frame kind, const std::function<void(Writer&)>& fields,
                                  std::chrono::milliseconds limit, const std::atomic<bool>* stop) {
  const Deadline deadline = deadline_after(limit);
  auto pending = std::make_shared<Pending>();
  std::unique_lock lock(mutex_);
  const auto number = next_call_++;
  if (left_)
    C10_THROW_ERROR(DistStoreError,
                    concat("rank ", hello_.rank, " has left the job's store on ", hello_.where));
  pending_[number] = pending;
  lock.unlock();
  try {
    Writer out(kind, number);
    fields(out);
    const std::string frame = out.take();
    if (frame.size() > largest_frame)
      C10_THROW_ERROR(ValueError,
                      concat("rank ", hello_.rank, " gave the job's store ", frame.size(),
                             " bytes in one call; it takes at most ", largest_frame));
    send(frame, deadline);
  } catch (...) {
    lock.lock();
    pending_.erase(number);
    throw;
  }
  lock.lock();
  changed_.wait_until(lock, deadline,
                      [&] { return pending->replied || !gone_.empty() || (stop && *stop); });
  pending_.erase(number);
  if (pending->replied) return std::move(pending->reply);
  const std::string gone = gone_.empty() && stop && *stop
                               ? "the call was given up, for the group that made it cannot go on"
                               : gone_;
  lock.unlock();
  if (!gone.empty()) C10_THROW_ERROR(DistStoreError, gone);
  send(Writer(Frame::cancel, number).take(), Clock::now() + std::chrono::milliseconds(100));
  C10_THROW_ERROR(
      DistStoreError,
      concat("rank ", hello_.rank, ": the job's store on ", hello_.where,
             " timed out: no answer within ", limit.count(),
             " ms (a key that no rank has set yet, or rank 0, which serves it, is stopped)"));
}

void StoreConnection::wake() {
  {
    const std::lock_guard lock(mutex_);
  }  // a call that has looked at its stop flag is waiting now
  changed_.notify_all();
}

void StoreConnection::run() {
  for (;;) {
    try {
      Transfer how;
      const std::string frame = receive_frame(socket_, Deadline::max(), largest_frame, how);
      if (how != Transfer::done) break;
      take(frame);
    } catch (const std::exception&) {  // an invalid frame, or no memory for it
      break;
    }
  }
  lose_store();
}

void StoreConnection::lose_store() {
  {
    const std::lock_guard lock(mutex_);
    gone_ = concat("rank ", hello_.rank, ": the job's store on ", hello_.where, " is gone",
                   left_ ? " (this rank left it)" : ": rank 0, which serves it, has ended");
  }
  changed_.notify_all();
  if (left_) return;
  tell([](const Listener& listener) {
    if (listener.lost) listener.lost(0, false, "rank 0 ended, and with it the job's store");
  });
}

void StoreConnection::take(const std::string& frame) {
  Reader in(frame);
  const auto of_call = [&](const auto& arrive) {
    const std::lock_guard lock(mutex_);
    if (const auto at = pending_.find(in.call); at != pending_.end()) arrive(*at->second);
  };
  switch (in.kind) {
    case Frame::reply:
      of_call([&](auto& call) {
        call.reply = frame;
        call.replied = true;
      });
      break;
    case Frame::answer: {
      RollEntry entry;
      entry.rank = in.number<std::int32_t>();
      entry.answer = in.number<std::uint8_t>() ? RollEntry::Answer::here : RollEntry::Answer::gone;
      entry.position.begun = in.number<std::uint64_t>();
      entry.position.operation = in.text();
      of_call([&](auto& call) { call.answers.push_back(std::move(entry)); });
      break;
    }
    case Frame::question: {
      const std::string group(in.text());
      Position answer;  // of a rank that has not made the group: it has begun no call there
      {
        const std::lock_guard lock(listener_mutex_);
        if (listener_.position) answer = listener_.position(group).value_or(answer);
      }
      try {
        send(Writer(Frame::position, in.call).number(answer.begun).text(answer.operation).take(),
             Clock::now() + std::chrono::seconds(1));
      } catch (const c10::Error&) {  // the next read ends the thread
      }
      return;
    }
    case Frame::poisoned: {
      const std::string group(in.text());
      Poison poison;
      poison.ranks = in.numbers<std::vector<int>>();
      const auto kind = in.number<std::uint8_t>();
      poison.timed_out = kind == 1;
      poison.mismatch = kind == 2;
      poison.reason = in.text();
      return tell([=](const Listener& listener) {
        if (listener.poisoned) listener.poisoned(group, poison);
      });
    }
    case Frame::lost: {
      const int rank = in.number<std::int32_t>();
      const bool on_purpose = in.number<std::uint8_t>() != 0;
      return tell([rank, on_purpose, text = std::string(in.text())](const Listener& listener) {
        if (listener.lost) listener.lost(rank, on_purpose, text);
      });
    }
    default:
      throw std::out_of_range("a frame that only a rank sends");
  }
  changed_.notify_all();
}

void StoreConnection::tell(std::function<void(const Listener&)> news) {
  const std::lock_guard lock(listener_mutex_);
  if (listening_)
    news(listener_);
  else
    news_.push_back(std::move(news));
}

void StoreConnection::listen(Listener listener) {
  const std::lock_guard lock(listener_mutex_);
  listening_ = static_cast<bool>(listener.lost);
  listener_ = std::move(listener);
  if (!listening_) return;
  for (const auto& news : news_) news(listener_);
  news_.clear();
}

void StoreConnection::announce(const std::string& group, const std::vector<int>& members,
                               const Poison& poison) noexcept {
  try {
    send(Writer(Frame::poison)
             .text(group)
             .numbers(members)
             .numbers(poison.ranks)
             .number(static_cast<std::uint8_t>(poison.mismatch ? 2 : poison.timed_out))
             .text(poison.reason)
             .take(),
         Clock::now() + std::chrono::milliseconds(200));
  } catch (...) {  // the store is gone, and the other ranks know that
  }
}

std::vector<RollEntry> StoreConnection::roll_call(const std::string& group,
                                                  const std::vector<int>& members,
                                                  std::chrono::milliseconds limit) noexcept {
  std::vector<RollEntry> roll;
  for (const int member : members) roll.push_back({member, RollEntry::Answer::unknown, {}});
  const Deadline deadline = deadline_after(limit);
  auto pending = std::make_shared<Pending>();
  std::uint64_t number = 0;
  try {
    {
      const std::lock_guard lock(mutex_);
      number = next_call_++;
      pending_[number] = pending;
    }
    send(Writer(Frame::ask, number).text(group).numbers(members).take(), deadline);
  } catch (...) {
  }
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline,
                      [&] { return pending->answers.size() >= members.size() || !gone_.empty(); });
  pending_.erase(number);
  for (auto& entry : roll) {
    // The server forwards questions: if it is silent, nothing is known except that rank 0, whose
    // thread it is, does not run.
    if (pending->replied)
      entry.answer = RollEntry::Answer::silent;
    else if (entry.rank == 0)
      entry.answer = gone_.empty() ? RollEntry::Answer::silent : RollEntry::Answer::gone;
    for (const auto& answer : pending->answers)
      if (answer.rank == entry.rank) entry = answer;
  }
  lock.unlock();
  try {
    if (pending->replied)
      send(Writer(Frame::cancel, number).take(), Clock::now() + std::chrono::milliseconds(100));
  } catch (...) {
  }
  return roll;
}

}  // namespace tessera::detail
