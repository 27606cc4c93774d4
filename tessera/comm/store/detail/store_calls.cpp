// StoreServer: keys, questions, and news of groups.

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "tessera/base/text.h"
#include "tessera/comm/store/detail/store_server.h"

namespace tessera::detail {
namespace {

std::vector<std::string> texts(Reader& in) {
  std::vector<std::string> all;
  for (auto n = in.number<std::uint32_t>(); n > 0; --n) all.emplace_back(in.text());
  return all;
}

// What a rank says of its position, if it is there.
std::string answer(std::uint64_t call, int rank, bool there = false, std::uint64_t begun = 0,
                   std::string_view operation = {}) {
  return Writer(Frame::answer, call)
      .number(std::int32_t{rank})
      .number(std::uint8_t{there})
      .number(begun)
      .text(operation)
      .take();
}

}  // namespace

void StoreServer::tell_lost(int rank, const std::string& who) {
  const auto text = left_[rank]
                        ? concat("rank ", rank, " (", who, ") has left the job")
                        : concat("rank ", rank, " (", who,
                                 ") ended without leaving the job (killed, crashed, or cut off)");
  send_to_all(Writer(Frame::lost)
                  .number(std::int32_t{rank})
                  .number(static_cast<std::uint8_t>(left_[rank]))
                  .text(text)
                  .take());
  // A rank that asked for its position need not wait for it.
  for (auto& [number, question] : questions_) {
    if (question.open.erase(rank) == 0) continue;
    if (const auto client = clients_.find(question.fd); client != clients_.end())
      send(*client->second, answer(question.call, rank));
  }
  std::erase_if(forgetting_, [this](const auto& f) { return forgotten(f.first, f.second); });
}

/// Answers if all keys are there, and else goes on to wait for the first that is not.
void StoreServer::settle(const std::shared_ptr<Waiter>& waiter) {
  Waiter& w = *waiter;
  while (w.known < w.keys.size() && values_.contains(w.keys[w.known])) ++w.known;
  if (w.known == w.keys.size())
    answer_waiter(w);
  else
    waiting_[w.keys[w.known]].push_back(waiter);
}

void StoreServer::answer_waiter(const Waiter& waiter) {
  const auto at = clients_.find(waiter.fd);
  if (at == clients_.end()) return;
  Writer out(Frame::reply, waiter.call);
  if (waiter.values)
    for (const auto& key : waiter.keys) {
      // another rank may have removed one that was there
      const auto value = values_.find(key);
      out.text(value == values_.end() ? std::string_view() : std::string_view(value->second));
    }
  send(*at->second, out.take());
}

void StoreServer::stored(const std::string& key) {
  const auto at = waiting_.find(key);
  if (at == waiting_.end()) return;
  const auto waiters = std::move(at->second);
  waiting_.erase(at);
  for (const auto& waiter : waiters) settle(waiter);
}

void StoreServer::stop_waiting(int fd, const std::uint64_t* call) {
  for (auto& [key, waiters] : waiting_)
    std::erase_if(waiters,
                  [&](const auto& w) { return w->fd == fd && (!call || w->call == *call); });
  std::erase_if(waiting_, [](const auto& w) { return w.second.empty(); });
  std::erase_if(questions_, [&](const auto& q) {
    return q.second.fd == fd && (!call || q.second.call == *call);
  });
}

void StoreServer::forget(Client& client, Reader& in) {
  const std::string prefix(in.text());
  auto& entry = forgetting_[prefix];
  entry.size = in.number<std::uint32_t>();
  entry.done.insert(client.rank);
  if (auto members = in.numbers<std::vector<int>>(); !members.empty())
    entry.members = std::move(members);
  if (forgotten(prefix, entry)) forgetting_.erase(prefix);
}

/// Removes the keys of the prefix if no member needs them any more.
bool StoreServer::forgotten(const std::string& prefix, const Forgetting& entry) {
  const bool over = entry.done.size() >= entry.size ||
                    (!entry.members.empty() && std::ranges::all_of(entry.members, [&](int member) {
                      return entry.done.count(member) || !of_rank(member);
                    }));
  if (!over) return false;
  auto at = values_.lower_bound(prefix);
  while (at != values_.end() && at->first.compare(0, prefix.size(), prefix) == 0)
    at = values_.erase(at);
  return true;
}

/// Handles frames about keys; false for any other frame.
bool StoreServer::serve_keys(Client& client, Reader& in) {
  Writer reply(Frame::reply, in.call);
  std::vector<std::string> changed;
  switch (in.kind) {
    case Frame::set:
      for (auto n = in.number<std::uint32_t>(); n > 0; --n) {
        changed.emplace_back(in.text());
        values_[changed.back()] = in.text();
      }
      break;
    case Frame::get:
    case Frame::wait: {
      settle(std::make_shared<Waiter>(
          Waiter{client.socket.fd(), in.call, in.kind == Frame::get, texts(in), 0}));
      return true;
    }
    case Frame::add: {
      changed.emplace_back(in.text());
      auto& value = values_[changed.back()];
      const auto before = value.empty() ? 0 : std::strtoll(value.c_str(), nullptr, 10);
      // Beyond the largest number it goes on at the smallest.
      const auto sum = static_cast<std::int64_t>(static_cast<std::uint64_t>(before) +
                                                 in.number<std::uint64_t>());
      value = std::to_string(sum);
      reply.number(sum);
      break;
    }
    case Frame::compare: {  // as c10d::Store::compareSet
      const std::string key(in.text()), expected(in.text()), desired(in.text());
      const auto at = values_.find(key);
      if (at == values_.end() ? expected.empty() : at->second == expected) {
        values_[key] = desired;
        changed = {key};
        reply.text(desired);
      } else {
        reply.text(at == values_.end() ? expected : at->second);
      }
      break;
    }
    case Frame::remove:
      reply.number(static_cast<std::int64_t>(values_.erase(std::string(in.text()))));
      break;
    case Frame::check: {
      const auto keys = texts(in);
      reply.number(std::int64_t{
          std::ranges::all_of(keys, [this](const auto& key) { return values_.contains(key); })});
      break;
    }
    case Frame::count:
      reply.number(static_cast<std::int64_t>(values_.size()));
      break;
    case Frame::append:
      changed.emplace_back(in.text());
      values_[changed.back()] += in.text();
      break;
    default:
      return false;
  }
  send(client, reply.take());
  for (const auto& key : changed) stored(key);
  return true;
}

void StoreServer::serve(Client& client, Reader& in) {
  if (client.rank < 0 && in.kind != Frame::hello)
    throw std::out_of_range("a call before the hello");
  if (serve_keys(client, in)) return;
  switch (in.kind) {
    case Frame::hello:
      if (client.rank >= 0) throw std::out_of_range("a second hello");
      return greet(client, in);
    case Frame::cancel:
      return stop_waiting(client.socket.fd(), &in.call);
    case Frame::forget:
      return forget(client, in);
    case Frame::leave:
      left_[client.rank] = true;
      broken_.push_back(client.socket.fd());
      return;
    case Frame::poison: {
      const std::string group(in.text());
      const auto members = in.numbers<std::vector<int>>();
      const auto lost = in.numbers<std::vector<int>>();
      const auto timed_out = in.number<std::uint8_t>();
      const auto frame = Writer(Frame::poisoned)
                             .text(group)
                             .numbers(lost)
                             .number(timed_out)
                             .text(in.text())
                             .take();
      for (const int member : members)
        if (Client* other = member == client.rank ? nullptr : of_rank(member)) send(*other, frame);
      return;
    }
    case Frame::ask: {
      const std::string group(in.text());
      const auto number = next_question_++;
      auto& question = questions_[number] = {client.socket.fd(), in.call, {}};
      send(client, Writer(Frame::reply, in.call).take());
      const auto frame = Writer(Frame::question, number).text(group).take();
      for (const int member : in.numbers<std::vector<int>>()) {
        Client* other = of_rank(member);
        if (!other)
          send(client, answer(in.call, member));
        else if (question.open.insert(member).second)
          send(*other, frame);
      }
      return;
    }
    case Frame::position: {
      const auto at = questions_.find(in.call);
      if (at == questions_.end() || at->second.open.erase(client.rank) == 0) return;
      const auto asker = clients_.find(at->second.fd);
      if (asker == clients_.end()) return;
      const auto begun = in.number<std::uint64_t>();
      send(*asker->second, answer(at->second.call, client.rank, true, begun, in.text()));
      return;
    }
    default:
      throw std::out_of_range("a frame that only the server sends");
  }
}

}  // namespace tessera::detail
