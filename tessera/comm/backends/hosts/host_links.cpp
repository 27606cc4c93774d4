#include "tessera/comm/backends/hosts/host_links.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/comm/backends/flat.h"

namespace tessera::detail {
namespace {

at::Tensor scratch_bytes(std::int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(at::kByte));
}

void copy_range(const at::Tensor& to, std::int64_t to_begin, const at::Tensor& from,
                std::int64_t from_begin, std::int64_t bytes) {
  if (bytes == 0) return;
  std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + to_begin,
              static_cast<const char*>(from.const_data_ptr()) + from_begin,
              static_cast<std::size_t>(bytes));
}

/// A call of a step, of which `output` is the result.
TransportCall step_of(const at::Tensor& output, const at::Tensor& input = {},
                      HostLinks::Counts counts = {}, int root = -1) {
  TransportCall step;
  step.output = output;
  step.input = input;
  step.counts = std::move(counts);
  step.root = root;
  return step;
}

/// Makes step `number` of a call over one of its links, and waits for it.
void make_step(const HostCall& call, std::uint64_t number, Transport& link, TransportCall step,
               Transport::Function make) {
  step.sign = call.sign == 0 ? 0 : Hash().number(call.sign).number(number).value();
  step.timeout = call.timeout;
  step.op = call.op;
  (link.*make)(step);
  step.wait();
}

}  // namespace

HostMap HostMap::of(const std::vector<std::string>& marks) {
  HostMap map;
  std::map<std::string, int> known;
  for (int rank = 0; rank < static_cast<int>(marks.size()); ++rank) {
    const auto [at, added] = known.emplace(marks[rank], static_cast<int>(map.hosts.size()));
    if (added) map.hosts.emplace_back();
    auto& host = map.hosts[at->second];
    map.host_of.push_back(at->second);
    map.place_of.push_back(static_cast<int>(host.size()));
    host.push_back(rank);
  }
  int next = 0;
  for (const auto& host : map.hosts)
    for (const int rank : host) map.in_order = map.in_order && rank == next++;
  return map;
}

HostLinks::HostLinks(HostMap map, int rank, TransportPtr near, TransportPtr wide,
                     TransportPtr leaders)
    : map_(std::move(map)),
      rank_(rank),
      host_(map_.host_of[index(rank)]),
      place_(map_.place_of[index(rank)]),
      near_(std::move(near)),
      wide_(std::move(wide)),
      leaders_(std::move(leaders)) {}

void HostLinks::abort() {
  if (!aborted_.exchange(true)) {
    // on purpose never freed
    for (const auto& link : {wide_, leaders_})
      if (link && link->abilities().may_hang) new TransportPtr(link);
  }
  for (const auto& link : {near_, wide_, leaders_})
    if (link) link->abort();
}

// ---- steps ----

void HostLinks::near_step(HostCall& call, TransportCall step, Transport::Function make) {
  step.blocking = true;
  if (near_) make_step(call, ++call.near, *near_, std::move(step), make);
}

void HostLinks::far_step(HostCall& call, TransportCall step, Transport::Function make) {
  make_step(call, ++call.far, *leaders_, std::move(step), make);
}

void HostLinks::near_broadcast(HostCall& call, const at::Tensor& data, int place) {
  near_step(call, step_of(data, {}, {}, place), &Transport::broadcast);
}

void HostLinks::near_reduce(HostCall& call, const at::Tensor& data) {
  near_step(call, step_of(data, {}, {}, 0), &Transport::reduce);
}

void HostLinks::near_rooted(HostCall& call, Transport::Function make, const at::Tensor& output,
                            const at::Tensor& input, const Counts& counts) {
  if (near_)
    near_step(call, step_of(output, input, counts, 0), make);
  else
    output.copy_(input);
}

void HostLinks::far_all_to_all(HostCall& call, const at::Tensor& output,
                               const Counts& output_counts, const at::Tensor& input,
                               const Counts& input_counts) {
  TransportCall step = step_of(output, input, output_counts);
  step.input_counts = input_counts;
  far_step(call, std::move(step), &Transport::all_to_all);
}

HostLinks::Counts HostLinks::per_host(const Counts& counts) const {
  Counts sums;
  for (const auto& host : map_.hosts) {
    sums.push_back(0);
    for (const int rank : host) sums.back() += counts[index(rank)];
  }
  return sums;
}

HostLinks::Counts HostLinks::of_mates(const Counts& counts) const {
  return mapped(mates(), [&](int rank) { return counts[index(rank)]; });
}

void HostLinks::copy_to(Order order, const at::Tensor& to, const at::Tensor& from,
                        const Counts& counts) const {
  const auto width = static_cast<std::int64_t>(from.element_size());
  const auto begins = begins_of(counts);
  const bool by_host = order == Order::of_hosts;
  std::int64_t begin = 0;
  for (const auto& host : map_.hosts)
    for (const int rank : host) {
      const auto bytes = counts[index(rank)] * width, of_rank = begins[index(rank)] * width;
      copy_range(to, by_host ? begin : of_rank, from, by_host ? of_rank : begin, bytes);
      begin += bytes;
    }
}

// ---- collectives ----

void HostLinks::barrier(HostCall& call) {
  near_step(call, {}, &Transport::barrier);
  if (leads()) far_step(call, {}, &Transport::barrier);
  near_step(call, {}, &Transport::barrier);
}

void HostLinks::broadcast(HostCall& call) {
  if (call.output.numel() == 0) return;
  const int home = map_.host_of[index(call.root)];
  if (host_ == home) near_broadcast(call, call.output, map_.place_of[index(call.root)]);
  if (leads()) far_step(call, step_of(call.output, {}, {}, home), &Transport::broadcast);
  if (host_ != home) near_broadcast(call, call.output, 0);
}

void HostLinks::all_reduce(HostCall& call) {
  if (call.output.numel() == 0) return;
  near_reduce(call, call.output);
  if (leads()) far_step(call, step_of(call.output), &Transport::all_reduce);
  near_broadcast(call, call.output, 0);
}

void HostLinks::reduce(HostCall& call) {
  const at::Tensor& data = call.output;
  if (data.numel() == 0) return;
  const int home = map_.host_of[index(call.root)], place = map_.place_of[index(call.root)];
  // The leader's tensor keeps its values unless it is the root.
  const at::Tensor sum = leads() && rank_ != call.root ? data.clone() : data;
  near_reduce(call, sum);
  if (leads()) far_step(call, step_of(sum, {}, {}, home), &Transport::reduce);
  if (host_ != home || place == 0) return;
  const at::Tensor part = rank_ == call.root ? data : at::empty({0}, data.options());
  near_rooted(call, &Transport::scatter, part, leads() ? sum : at::Tensor(),
              only_for(place, data.numel(), mates().size()));
}

void HostLinks::reduce_scatter(HostCall& call) {
  if (call.input.numel() == 0) return;
  const at::Tensor sum = leads() ? call.input.clone() : call.input;
  near_reduce(call, sum);
  at::Tensor block;
  if (leads()) {
    at::Tensor ordered = sum;
    if (!map_.in_order) {
      ordered = at::empty_like(sum);
      copy_to(Order::of_hosts, ordered, sum, call.counts);
    }
    // Each host gets its rows from every host, and reduces them in the order of the hosts.
    const Counts rows = per_host(call.counts);
    block = at::empty({rows[index(host_)]}, sum.options());
    far_step(call, step_of(block, ordered, rows), &Transport::compose_reduce_scatter);
  }
  near_rooted(call, &Transport::scatter, call.output, block, of_mates(call.counts));
}

void HostLinks::all_gather(HostCall& call) {
  const at::Tensor& output = call.output;
  if (output.numel() == 0) return;
  const Counts blocks = per_host(call.counts);
  at::Tensor whole, block;
  if (leads()) {
    whole = map_.in_order ? output : scratch_bytes(output.numel());
    block = whole.narrow(0, begins_of(blocks)[index(host_)], blocks[index(host_)]);
  }
  near_rooted(call, &Transport::gather, block, call.input, of_mates(call.counts));
  if (leads()) {
    far_step(call, step_of(whole, block, blocks), &Transport::all_gather);
    if (!map_.in_order) copy_to(Order::of_group, output, whole, call.counts);
  }
  near_broadcast(call, output, 0);
}

void HostLinks::gather(HostCall& call) {
  const int home = map_.host_of[index(call.root)], place = map_.place_of[index(call.root)];
  const std::int64_t total = total_of(call.counts);
  if (total == 0) return;
  const Counts blocks = per_host(call.counts);
  at::Tensor block, whole;
  if (leads()) block = scratch_bytes(blocks[index(host_)]);
  near_rooted(call, &Transport::gather, block, call.input, of_mates(call.counts));
  if (leads()) {
    const bool receives = host_ == home;
    whole = scratch_bytes(receives ? total : 0);
    far_all_to_all(call, whole, receives ? blocks : Counts(blocks.size(), 0), block,
                   only_for(home, blocks[index(host_)], blocks.size()));
    if (receives) {
      const at::Tensor ordered = rank_ == call.root ? call.output : scratch_bytes(total);
      copy_to(Order::of_group, ordered, whole, call.counts);
      whole = ordered;
    }
  }
  if (host_ != home || place == 0) return;
  near_rooted(call, &Transport::scatter, rank_ == call.root ? call.output : scratch_bytes(0), whole,
              only_for(place, total, mates().size()));
}

void HostLinks::scatter(HostCall& call) {
  const int home = map_.host_of[index(call.root)], place = map_.place_of[index(call.root)];
  const std::int64_t total = total_of(call.counts);
  if (total == 0) return;
  at::Tensor whole = call.input;
  if (host_ == home && place != 0) {
    if (leads()) whole = scratch_bytes(total);
    near_rooted(call, &Transport::gather, leads() ? whole : at::Tensor(),
                rank_ == call.root ? call.input : scratch_bytes(0),
                only_for(place, total, mates().size()));
  }
  at::Tensor block;
  if (leads()) {
    const Counts blocks = per_host(call.counts);
    at::Tensor ordered = scratch_bytes(0);
    if (host_ == home) {
      ordered = scratch_bytes(total);
      copy_to(Order::of_hosts, ordered, whole, call.counts);
    }
    block = scratch_bytes(blocks[index(host_)]);
    far_all_to_all(call, block, only_for(home, blocks[index(host_)], blocks.size()), ordered,
                   host_ == home ? blocks : Counts(blocks.size(), 0));
  }
  near_rooted(call, &Transport::scatter, call.output, block, of_mates(call.counts));
}

// ---- the all-to-all, whose sizes each rank knows for itself alone ----

std::vector<HostLinks::Counts> HostLinks::near_counts(HostCall& call) {
  const auto n = static_cast<std::int64_t>(map_.size());
  const auto ranks = static_cast<std::int64_t>(mates().size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  auto mine = at::empty({2 * n}, options), all = at::empty({ranks * 2 * n}, options);
  auto* row = mine.mutable_data_ptr<std::int64_t>();
  std::ranges::copy(call.input_counts, row);
  std::ranges::copy(call.counts, row + n);
  if (near_)
    near_step(call, step_of(all, mine, Counts(mates().size(), 2 * n)), &Transport::all_gather);
  else
    all.copy_(mine);
  std::vector<Counts> rows;
  const auto* data = all.const_data_ptr<std::int64_t>();
  for (std::int64_t place = 0; place < ranks; ++place)
    rows.emplace_back(data + place * 2 * n, data + (place + 1) * 2 * n);
  return rows;
}

namespace {

[[noreturn]] void refuse_pair(int from, int to, std::int64_t sent, std::int64_t awaited) {
  throw FinalMismatch("all_to_all: ranks called different things: rank ", from,
                      " of the group sends ", sent, " bytes to rank ", to, ", which waits for ",
                      awaited, "; make the sizes agree");
}

}  // namespace

void HostLinks::compare_far_counts(HostCall& call, const std::vector<Counts>& rows) {
  const auto hosts = map_.hosts.size(), n = index(map_.size());
  Counts sent, sent_numbers(hosts, 0), received_numbers(hosts, 0);
  for (std::size_t host = 0; host < hosts; ++host) {
    if (host == index(host_)) continue;
    const auto pairs = static_cast<std::int64_t>(map_.hosts[host].size() * mates().size());
    sent_numbers[host] = received_numbers[host] = pairs;
    for (const auto& row : rows)
      for (const int rank : map_.hosts[host]) sent.push_back(row[index(rank)]);
  }
  const auto options = at::TensorOptions().dtype(at::kLong);
  const auto out = at::empty({static_cast<std::int64_t>(sent.size())}, options),
             in = at::empty({static_cast<std::int64_t>(sent.size())}, options);
  std::ranges::copy(sent, out.mutable_data_ptr<std::int64_t>());
  far_all_to_all(call, in, received_numbers, out, sent_numbers);
  const auto* number = in.const_data_ptr<std::int64_t>();
  for (std::size_t host = 0; host < hosts; ++host) {
    if (host == index(host_)) continue;
    for (const int from : map_.hosts[host])
      for (std::size_t place = 0; place < rows.size(); ++place, ++number)
        if (*number != rows[place][n + index(from)])
          refuse_pair(from, mates()[place], *number, rows[place][n + index(from)]);
  }
}

void HostLinks::all_to_all(HostCall& call) {
  const at::Tensor &output = call.output, &input = call.input;
  const Counts &output_counts = call.counts, &input_counts = call.input_counts;
  const auto rows = near_counts(call);
  const auto n = index(map_.size());
  for (std::size_t a = 0; a < rows.size(); ++a)
    for (std::size_t b = 0; b < rows.size(); ++b) {
      const int from = mates()[a], to = mates()[b];
      const auto sent = rows[a][index(to)], awaited = rows[b][n + index(from)];
      if (sent != awaited) refuse_pair(from, to, sent, awaited);
    }
  if (leads()) compare_far_counts(call, rows);
  const auto begin_in = begins_of(input_counts), begin_out = begins_of(output_counts);
  if (near_) {
    TransportCall step;
    step.tag = TransportCall::kInternal;
    for (std::size_t place = 0; place < mates().size(); ++place) {
      const auto m = index(mates()[place]);
      const int peer = static_cast<int>(place);
      if (peer == place_) continue;
      step.messages.push_back(
          {Message::Kind::receive, output.narrow(0, begin_out[m], output_counts[m]), peer});
      step.messages.push_back(
          {Message::Kind::send, input.narrow(0, begin_in[m], input_counts[m]), peer});
    }
    near_step(call, std::move(step), &Transport::exchange);
  }
  copy_range(output, begin_out[index(rank_)], input, begin_in[index(rank_)],
             input_counts[index(rank_)]);
  all_to_all_far(call, rows);
}

std::vector<std::size_t> HostLinks::far_ranks() const {
  std::vector<std::size_t> far;
  for (std::size_t host = 0; host < map_.hosts.size(); ++host)
    if (host != index(host_))
      for (const int rank : map_.hosts[host]) far.push_back(index(rank));
  return far;
}

at::Tensor HostLinks::exchange_far(HostCall& call, const std::vector<Counts>& rows,
                                   const at::Tensor& gathered, const Counts& sent,
                                   const Counts& awaited) {
  const auto n = index(map_.size()), hosts = map_.hosts.size();
  Counts to(hosts, 0), from(hosts, 0);
  const auto outgoing = scratch_bytes(gathered.numel());
  auto read = begins_of(sent);
  std::int64_t at_outgoing = 0;
  for (std::size_t host = 0; host < hosts; ++host) {
    if (host == index(host_)) continue;
    for (std::size_t mate = 0; mate < rows.size(); ++mate) {
      std::int64_t bytes = 0;
      for (const int rank : map_.hosts[host]) {
        bytes += rows[mate][index(rank)];
        from[host] += rows[mate][n + index(rank)];
      }
      copy_range(outgoing, at_outgoing, gathered, read[mate], bytes);
      read[mate] += bytes;
      at_outgoing += bytes;
      to[host] += bytes;
    }
  }
  const auto incoming = scratch_bytes(total_of(from));
  far_all_to_all(call, incoming, from, outgoing, to);
  // By host and sender, then by receiver, as it came; by receiver first, as it is dealt.
  const auto dealt = scratch_bytes(incoming.numel());
  auto write = begins_of(awaited);
  std::int64_t at_incoming = 0;
  for (const auto sender : far_ranks())
    for (std::size_t mate = 0; mate < rows.size(); ++mate) {
      const auto bytes = rows[mate][n + sender];
      copy_range(dealt, write[mate], incoming, at_incoming, bytes);
      write[mate] += bytes;
      at_incoming += bytes;
    }
  return dealt;
}

void HostLinks::all_to_all_far(HostCall& call, const std::vector<Counts>& rows) {
  const at::Tensor &output = call.output, &input = call.input;
  const Counts &output_counts = call.counts, &input_counts = call.input_counts;
  const auto far = far_ranks();
  const auto far_sum = [&](const Counts& row, std::size_t first) {
    std::int64_t sum = 0;
    for (const auto rank : far) sum += row[first + rank];
    return sum;
  };
  const auto begin_in = begins_of(input_counts), begin_out = begins_of(output_counts);
  const auto packed = scratch_bytes(far_sum(input_counts, 0));
  std::int64_t at_packed = 0;
  for (const auto rank : far) {
    copy_range(packed, at_packed, input, begin_in[rank], input_counts[rank]);
    at_packed += input_counts[rank];
  }
  const auto sent_by_mate = mapped(rows, [&](const Counts& row) { return far_sum(row, 0); });
  const auto awaited_by_mate =
      mapped(rows, [&](const Counts& row) { return far_sum(row, index(map_.size())); });
  at::Tensor gathered, dealt;
  if (leads()) gathered = scratch_bytes(total_of(sent_by_mate));
  near_rooted(call, &Transport::gather, gathered, packed, sent_by_mate);
  if (leads()) dealt = exchange_far(call, rows, gathered, sent_by_mate, awaited_by_mate);
  const auto mine = scratch_bytes(far_sum(output_counts, 0));
  near_rooted(call, &Transport::scatter, mine, dealt, awaited_by_mate);
  std::int64_t at_mine = 0;
  for (const auto rank : far) {
    copy_range(output, begin_out[rank], mine, at_mine, output_counts[rank]);
    at_mine += output_counts[rank];
  }
}

}  // namespace tessera::detail
