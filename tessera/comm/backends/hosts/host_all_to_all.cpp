// The all-to-all of HostLinks, whose sizes each rank knows for itself alone.

#include <algorithm>

#include "tessera/comm/backends/hosts/host_steps.h"

namespace tessera::detail {

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
  Counts sent_by_mate, awaited_by_mate;
  for (const auto& row : rows) {
    sent_by_mate.push_back(far_sum(row, 0));
    awaited_by_mate.push_back(far_sum(row, index(map_.size())));
  }
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
