// StoreServer: which connections are admitted to the meeting of the ranks.

#include <cstdio>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/store/detail/store_server.h"

namespace tessera::detail {

void StoreServer::refuse(Client& client, const std::string& text, const std::vector<int>& ranks) {
  client.closing = true;
  send(client, Writer(Frame::refused).text(text).numbers(ranks).take());
}

void StoreServer::fail_meeting(const std::string& text, const std::vector<int>& ranks) {
  failure_ = text;
  failure_ranks_ = ranks;
  deadline_ = Deadline::max();
  for (int rank = 0; rank < world_size_; ++rank)
    if (Client* client = of_rank(rank)) refuse(*client, text, ranks);
}

std::vector<int> StoreServer::missing() const {
  return numbers_below(world_size_, [&](int rank) { return fd_of_rank_[rank] < 0; });
}

void StoreServer::tell_missing() {
  if (tell_ == Deadline::max()) return;
  const bool waits = !complete_ && failure_.empty() && !stop_;
  if (waits && Clock::now() < tell_) return;
  tell_ = Deadline::max();
  if (waits)
    std::fprintf(
        stderr, "%s\n",
        concat("tessera: rank 0 waits on port ", port_, " for ranks ", list(missing()), " of ",
               world_size_, ": start them with this address and port, or look why they do not come")
            .c_str());
}

void StoreServer::check_deadline() {
  if (complete_ || !failure_.empty() || Clock::now() < deadline_) return;
  const std::vector<int> missing = this->missing();
  std::string more;
  if (no_descriptors_)
    more += concat("; rank 0 ran out of file descriptors (limit ", allow_descriptors(0),
                   "): raise ulimit -n on its host");
  if (turned_away_ > 0)
    more +=
        concat("; ", turned_away_, turned_away_ == 1 ? " connection was" : " connections were",
               " turned away that did not know the job's secret, the last from ", last_stranger_);
  fail_meeting(concat(missing.size() == 1 ? "rank " : "ranks ",
                      missing.size() == 1 ? std::to_string(missing[0]) : list(missing), " of ",
                      world_size_, " did not come to the rendezvous within ", shortest_.count(),
                      " ms; check that all of them were started, with this address and port", more),
               missing);
}

void StoreServer::greet(Client& client, Reader& in) {
  const auto rank = in.number<std::int32_t>();
  const auto world = in.number<std::int32_t>();
  const auto limit = in.number<std::int64_t>();
  const auto who = in.text(), job = in.text(), nonce = in.text(), proof = in.text();
  const auto fields = hello_fields(rank, world, limit, who, job, nonce).take();
  if (!same_proof(proof, rank_proof(secret_, client.nonce, fields))) {
    ++turned_away_;
    last_stranger_ = peer_name(client.socket);
    return refuse(client,
                  "this process does not know the job's secret; start all ranks by one launcher, "
                  "or set TESSERA_SECRET to the same text on every rank");
  }
  strangers_.erase(client.number);
  client.who = printable(who, longest_name);
  send(client, Writer(Frame::welcome).text(store_proof(secret_, client.nonce, fields)).take());
  if (job != job_)
    return refuse(client,
                  concat("this store serves the job '", printable(job_), "', and rank ", rank,
                         " belongs to '", printable(job), "'; give each job a port of its own"));
  if (!failure_.empty()) return refuse(client, failure_, failure_ranks_);
  if (world != world_size_) {
    const auto text =
        concat("rank ", rank, " (", client.who, ") says that the world size is ", world,
               ", rank 0 says ", world_size_, "; start all ranks with the same number");
    refuse(client, text, {rank});
    if (!complete_) fail_meeting(text, {rank});
    return;
  }
  if (rank < 0 || rank >= world_size_)
    return refuse(client, concat("rank ", rank, " is not in a world of ", world_size_), {rank});
  // the frame that it leaves may still be in its queue
  if (Client* before = complete_ ? of_rank(rank) : nullptr) read(*before);
  // the rank belongs to a later meeting of the same job, and this store is about to end
  if (complete_ && left_[rank]) {
    client.closing = true;
    return send(client, Writer(Frame::retry).take());
  }
  if (complete_ || fd_of_rank_[rank] >= 0) {
    const Client* first = of_rank(rank);
    const auto text = concat("two processes say that they are rank ", rank, ": ",
                             first ? first->who : "one that has ended", ", and ", client.who,
                             "; give each process its own rank");
    refuse(client, text, {rank});
    if (!complete_) fail_meeting(text, {rank});
    return;
  }
  let_in(client, rank, bounded_limit(std::chrono::milliseconds(limit)));
}

void StoreServer::let_in(Client& client, int rank, std::chrono::milliseconds limit) {
  client.rank = rank;
  fd_of_rank_[rank] = client.socket.fd();
  if (const auto deadline = deadline_after(limit); deadline < deadline_) {
    deadline_ = deadline;
    shortest_ = limit;
  }
  if (++here_ < world_size_) return;
  complete_ = true;
  deadline_ = Deadline::max();
  send_to_all(Writer(Frame::ready).take());
}

}  // namespace tessera::detail
