#include "tessera/ops/attention/detail/straight.h"

#include <algorithm>
#include <limits>
#include <span>
#include <tuple>

namespace tessera::detail::ring_attention_rules {
namespace {

// So many queries of a document are computed at once: no more scores are held, and a causal mask
// hides few of them.
constexpr std::int64_t kQueriesAtOnce = 256;
// Messages whose memory is held while they are sent.
constexpr std::size_t kLeaving = 2;

/// The documents of the rows of this rank's batch; of one list for all of them that.
std::span<const std::vector<std::int64_t>> own_documents(const Ring& ring) {
  const std::span all(ring.documents);
  return all.size() < 2 ? all
                        : all.subspan(static_cast<std::size_t>(ring.query.local_offset()[0]),
                                      static_cast<std::size_t>(ring.query.local_shape()[0]));
}

/// The documents of a row that have some of these tokens.
std::vector<Interval> documents_in(const std::vector<std::int64_t>& bounds,
                                   const Interval& tokens) {
  std::vector<Interval> all;
  auto end = std::ranges::upper_bound(bounds, tokens.begin);
  for (; end != bounds.end() && *(end - 1) < tokens.end; ++end) {
    const Interval document{*(end - 1), *end};
    if (!intersect(document, tokens).empty()) all.push_back(document);
  }
  return all;
}

}  // namespace

std::vector<Visit> visits(const Round& round, int rank) {
  const Interval queries = round.columns(rank);
  if (queries.empty()) return {};
  std::vector<Visit> all{{rank, queries, 0, 0}};
  std::vector<Interval> shared;
  for (const auto& bounds : own_documents(round.ring)) {
    for (const Interval& document : documents_in(bounds, queries)) {
      const std::int64_t n = intersect(document, queries).size();
      all[0].end += round.ring.causal ? n * (n + 1) / 2 : n * n;
      if (!queries.contains(document)) shared.push_back(document);
    }
  }
  // The nearest first: then hardly any two read from one rank at the same time.
  for (int step = 1; step < round.ranks; ++step) {
    const int owner = (rank + round.ranks - step) % round.ranks;
    if (round.ring.causal && owner > rank) continue;
    Visit visit{owner, {}, all.back().end, all.back().end};
    for (const Interval& document : shared) {
      const Interval keys = intersect(document, round.columns(owner));
      if (keys.empty()) continue;
      visit.end += intersect(document, queries).size() * keys.size();
      visit.keys = visit.keys.empty() ? keys
                                      : Interval{std::min(visit.keys.begin, keys.begin),
                                                 std::max(visit.keys.end, keys.end)};
    }
    if (!visit.keys.empty()) all.push_back(visit);
  }
  return all;
}

std::vector<Block> blocks_of_documents(const Round& round, const Interval& keys) {
  std::vector<Block> all;
  const Interval queries = round.columns(round.me);
  const auto rows = own_documents(round.ring);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::int64_t row = round.ring.documents.size() < 2 ? -1 : static_cast<std::int64_t>(r);
    for (const Interval& document : documents_in(rows[r], queries)) {
      const Interval own = intersect(document, queries);
      for (std::int64_t at = own.begin; at < own.end; at += kQueriesAtOnce) {
        const std::int64_t end = std::min(at + kQueriesAtOnce, own.end);
        Interval some = intersect(document, keys);
        if (round.ring.causal) some.end = std::min(some.end, end);
        if (!some.empty()) all.push_back({{at - queries.begin, end - at, at, row}, some});
      }
    }
  }
  return all;
}

Courier::Courier(const Round& round, std::vector<at::Tensor> own, std::vector<at::Tensor> sums)
    : round_(round), own_(std::move(own)), sums_(std::move(sums)) {
  for (int reader = 0; reader < round.ranks; ++reader) {
    // Keys come while the rank computes with those before.
    std::int64_t before = 0;
    for (const Visit& visit : visits(round, reader)) {
      if (visit.owner != reader && (reader == round.me || visit.owner == round.me)) {
        due_.push_back({before, false, reader, visit.owner, visit.keys});
        if (!sums_.empty()) due_.push_back({visit.end, true, reader, visit.owner, visit.keys});
      }
      before = visit.begin;
    }
  }
  std::ranges::sort(due_, [](const Due& a, const Due& b) {
    return std::tie(a.time, a.sums, a.reader, a.owner) <
           std::tie(b.time, b.sums, b.reader, b.owner);
  });
}

void Courier::until(std::int64_t now, const std::vector<at::Tensor>& part) {
  std::vector<at::Tensor> none;
  for (; next_ < due_.size() && due_[next_].time <= now; ++next_) {
    const Due& due = due_[next_];
    if (due.sums == (due.reader == round_.me)) {
      if (leaving_.size() == kLeaving) {
        leaving_.front().wait();
        leaving_.pop_front();
      }
      leaving_.push_back(round_.pass(due.sums ? part : of_mine(own_, due.keys), none, 0,
                                     due.sums ? due.owner : due.reader, -1));
    } else if (due.sums) {
      add_returned();
      of_returned_ = due.keys;
      returning_ = round_.pass(sums_, returned_, due.keys.size(), -1, due.reader);
    } else {
      auto& [request, keys] = coming_.emplace_back();
      request = round_.pass(own_, keys, due.keys.size(), -1, due.owner);
    }
  }
}

std::vector<at::Tensor> Courier::arrived() {
  coming_.front().first.wait();
  auto keys = std::move(coming_.front().second);
  coming_.pop_front();
  return keys;
}

void Courier::finish(const std::vector<at::Tensor>& part) {
  until(std::numeric_limits<std::int64_t>::max(), part);
  add_returned();
  for (Request& request : leaving_) request.wait();
}

std::vector<at::Tensor> Courier::of_mine(const std::vector<at::Tensor>& all,
                                         const Interval& keys) const {
  const std::int64_t first = keys.begin - round_.columns(round_.me).begin;
  return mapped(all, [&](const at::Tensor& t) { return t.narrow(-2, first, keys.size()); });
}

void Courier::add_returned() {
  if (returned_.empty()) return;
  returning_.wait();
  const auto own = of_mine(sums_, of_returned_);
  for (std::size_t i = 0; i < own.size(); ++i) own[i].add_(returned_[i]);
  returned_.clear();
}

}  // namespace tessera::detail::ring_attention_rules
