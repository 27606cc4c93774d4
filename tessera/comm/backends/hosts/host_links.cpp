#include "tessera/comm/backends/hosts/host_links.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {
namespace {

std::int64_t sum_of_counts(const HostLinks::Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

at::Tensor scratch_bytes(std::int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(at::kByte));
}

// The same memory as bytes. A tensor of one element may have any stride.
at::Tensor bytes_view(const at::Tensor& flat) {
  return flat.as_strided({flat.numel()}, {1}).view(at::kByte);
}

void copy_range(const at::Tensor& to, std::int64_t to_begin, const at::Tensor& from,
                std::int64_t from_begin, std::int64_t bytes) {
  if (bytes == 0) return;
  std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + to_begin,
              static_cast<const char*>(from.const_data_ptr()) + from_begin,
              static_cast<std::size_t>(bytes));
}

HostLinks::Counts begins_of(const HostLinks::Counts& counts) {
  HostLinks::Counts begins;
  std::int64_t begin = 0;
  for (const auto count : counts) {
    begins.push_back(begin);
    begin += count;
  }
  return begins;
}

std::uint64_t sign_of_step(std::uint64_t call, std::uint64_t step) {
  return call == 0 ? 0 : Hash().number(call).number(step).value();
}

}  // namespace

HostLinks::HostLinks(HostMap map, int rank, BackendPtr near, BackendPtr wide, BackendPtr leaders)
    : map_(std::move(map)),
      rank_(rank),
      host_(map_.host_of[index(rank)]),
      place_(map_.place_of[index(rank)]),
      near_(std::move(near)),
      wide_(std::move(wide)),
      leaders_(std::move(leaders)),
      near_uneven_(dynamic_cast<UnevenBackend*>(near_.get())),
      near_signing_(dynamic_cast<SigningBackend*>(near_.get())),
      far_signing_(dynamic_cast<SigningBackend*>(leaders_.get())) {}

void HostLinks::abort() {
  if (!aborted_.exchange(true)) {
    // On purpose never freed: its threads may be in a call that nothing but its own limit ends, and
    // its destructor would wait for them.
    for (const auto& link : {wide_, leaders_}) BackendPtr(link).release();
  }
  for (const auto& link : {near_, wide_, leaders_})
    if (link) link->abort();
}

// ---- steps ----

template <class Options>
Options HostLinks::near_options(HostCall& call) {
  const CallLimit limit = near_limit(call);
  Options options;
  options.timeout = limit.timeout;
  options.asyncOp = false;
  return options;
}

CallLimit HostLinks::near_limit(HostCall& call) {
  if (near_signing_) near_signing_->sign(sign_of_step(call.sign, ++call.near));
  return {call.limit, true};
}

template <class Options>
Options HostLinks::far_options(HostCall& call) {
  if (far_signing_) far_signing_->sign(sign_of_step(call.sign, ++call.far));
  Options options;
  options.timeout = call.limit;
  return options;
}

void HostLinks::near_barrier(HostCall& call) {
  if (near_) near_->barrier(near_options<c10d::BarrierOptions>(call))->wait();
}

void HostLinks::near_broadcast(HostCall& call, at::Tensor data, int place) {
  if (!near_) return;
  auto options = near_options<c10d::BroadcastOptions>(call);
  options.rootRank = place;
  std::vector<at::Tensor> tensors{std::move(data)};
  near_->broadcast(tensors, options)->wait();
}

void HostLinks::near_reduce(HostCall& call, at::Tensor data, const c10d::ReduceOp& op) {
  if (!near_) return;
  auto options = near_options<c10d::ReduceOptions>(call);
  options.reduceOp = op;
  options.rootRank = 0;
  std::vector<at::Tensor> tensors{std::move(data)};
  near_->reduce(tensors, options)->wait();
}

void HostLinks::near_gather(HostCall& call, const at::Tensor& whole, const at::Tensor& part,
                            const Counts& counts, int place) {
  if (near_) {
    near_uneven_->gather_v(whole, part, counts, place, near_limit(call))->wait();
  } else {
    whole.copy_(part);
  }
}

void HostLinks::near_scatter(HostCall& call, const at::Tensor& part, const at::Tensor& whole,
                             const Counts& counts, int place) {
  if (near_) {
    near_uneven_->scatter_v(part, whole, counts, place, near_limit(call))->wait();
  } else {
    part.copy_(whole);
  }
}

void HostLinks::far_broadcast(HostCall& call, at::Tensor data, int host) {
  auto options = far_options<c10d::BroadcastOptions>(call);
  options.rootRank = host;
  std::vector<at::Tensor> tensors{std::move(data)};
  leaders_->broadcast(tensors, options)->wait();
}

void HostLinks::far_all_to_all(HostCall& call, at::Tensor output, Counts output_counts,
                               at::Tensor input, Counts input_counts) {
  leaders_
      ->alltoall_base(output, input, output_counts, input_counts,
                      far_options<c10d::AllToAllOptions>(call))
      ->wait();
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
  Counts mine;
  for (const int rank : mates()) mine.push_back(counts[index(rank)]);
  return mine;
}

HostLinks::Counts HostLinks::only_for(int place, std::int64_t count) const {
  Counts counts(mates().size(), 0);
  counts[index(place)] = count;
  return counts;
}

void HostLinks::copy_to_hosts_order(const at::Tensor& to, const at::Tensor& from,
                                    const Counts& counts) const {
  const auto width = static_cast<std::int64_t>(from.element_size());
  const auto begins = begins_of(counts);
  std::int64_t begin = 0;
  for (const auto& host : map_.hosts)
    for (const int rank : host) {
      const auto bytes = counts[index(rank)] * width;
      copy_range(to, begin, from, begins[index(rank)] * width, bytes);
      begin += bytes;
    }
}

void HostLinks::copy_to_group_order(const at::Tensor& to, const at::Tensor& from,
                                    const Counts& counts) const {
  const auto width = static_cast<std::int64_t>(from.element_size());
  const auto begins = begins_of(counts);
  std::int64_t begin = 0;
  for (const auto& host : map_.hosts)
    for (const int rank : host) {
      const auto bytes = counts[index(rank)] * width;
      copy_range(to, begins[index(rank)] * width, from, begin, bytes);
      begin += bytes;
    }
}

// ---- collectives ----

void HostLinks::barrier(HostCall& call) {
  near_barrier(call);
  if (leads()) leaders_->barrier(far_options<c10d::BarrierOptions>(call))->wait();
  near_barrier(call);
}

void HostLinks::broadcast(HostCall& call, const at::Tensor& data, int root) {
  const int home = map_.host_of[index(root)];
  if (host_ == home) near_broadcast(call, data, map_.place_of[index(root)]);
  if (leads()) far_broadcast(call, data, home);
  if (host_ != home) near_broadcast(call, data, 0);
}

void HostLinks::all_reduce(HostCall& call, const at::Tensor& data, const c10d::ReduceOp& op) {
  near_reduce(call, data, op);
  if (leads()) {
    auto options = far_options<c10d::AllreduceOptions>(call);
    options.reduceOp = op;
    std::vector<at::Tensor> tensors{data};
    leaders_->allreduce(tensors, options)->wait();
  }
  near_broadcast(call, data, 0);
}

void HostLinks::reduce(HostCall& call, const at::Tensor& data, const c10d::ReduceOp& op, int root) {
  const int home = map_.host_of[index(root)], place = map_.place_of[index(root)];
  // The leader's tensor keeps its values unless it is the root.
  const at::Tensor sum = leads() && rank_ != root ? data.clone() : data;
  near_reduce(call, sum, op);
  if (leads()) {
    auto options = far_options<c10d::ReduceOptions>(call);
    options.reduceOp = op;
    options.rootRank = home;
    std::vector<at::Tensor> tensors{sum};
    leaders_->reduce(tensors, options)->wait();
  }
  if (host_ != home || place == 0) return;
  const at::Tensor part = rank_ == root ? data : at::empty({0}, data.options());
  near_scatter(call, part, leads() ? sum : at::Tensor(), only_for(place, data.numel()), 0);
}

void HostLinks::reduce_scatter(HostCall& call, const at::Tensor& output, const at::Tensor& input,
                               const Counts& counts, ReduceOp::Kind kind,
                               const c10d::ReduceOp& op) {
  const at::Tensor sum = leads() ? input.clone() : input;
  near_reduce(call, sum, op);
  at::Tensor block;
  if (leads()) {
    at::Tensor ordered = sum;
    if (!map_.in_order) {
      ordered = at::empty_like(sum);
      copy_to_hosts_order(ordered, sum, counts);
    }
    // Each host gets its rows from every host, and reduces them in the order of the hosts.
    const auto width = static_cast<std::int64_t>(input.element_size());
    Counts sent = per_host(counts);
    const std::int64_t mine = sent[index(host_)];
    for (auto& count : sent) count *= width;
    const auto received = at::empty({map_.count() * mine}, input.options());
    far_all_to_all(call, bytes_view(received), Counts(map_.hosts.size(), mine * width),
                   bytes_view(ordered), sent);
    block = at::empty({mine}, input.options());
    std::vector<at::Tensor> parts;
    for (int host = 0; host < map_.count(); ++host)
      parts.push_back(received.narrow(0, host * mine, mine));
    if (mine > 0) reduce_in_order(block, parts, kind);
  }
  near_scatter(call, output, block, of_mates(counts), 0);
}

void HostLinks::all_gather(HostCall& call, const at::Tensor& output, const at::Tensor& input,
                           const Counts& counts) {
  const Counts blocks = per_host(counts);
  at::Tensor whole, block;
  if (leads()) {
    whole = map_.in_order ? output : scratch_bytes(output.numel());
    block = whole.narrow(0, begins_of(blocks)[index(host_)], blocks[index(host_)]);
  }
  near_gather(call, block, input, of_mates(counts), 0);
  if (leads()) {
    const bool even = std::all_of(blocks.begin(), blocks.end(),
                                  [&](std::int64_t b) { return b == blocks.front(); });
    if (even) {
      leaders_->_allgather_base(whole, block, far_options<c10d::AllgatherOptions>(call))->wait();
    } else {
      std::int64_t begin = 0;
      for (int host = 0; host < map_.count(); ++host) {
        const auto bytes = blocks[index(host)];
        if (bytes > 0) far_broadcast(call, whole.narrow(0, begin, bytes), host);
        begin += bytes;
      }
    }
    if (!map_.in_order) copy_to_group_order(output, whole, counts);
  }
  near_broadcast(call, output, 0);
}

void HostLinks::gather(HostCall& call, const at::Tensor& output, const at::Tensor& input,
                       const Counts& counts, int root) {
  const int home = map_.host_of[index(root)], place = map_.place_of[index(root)];
  const std::int64_t total = sum_of_counts(counts);
  const Counts blocks = per_host(counts);
  at::Tensor block, whole;
  if (leads()) block = scratch_bytes(blocks[index(host_)]);
  near_gather(call, block, input, of_mates(counts), 0);
  if (leads()) {
    const bool receives = host_ == home;
    whole = scratch_bytes(receives ? total : 0);
    Counts sent(map_.hosts.size(), 0);
    sent[index(home)] = blocks[index(host_)];
    far_all_to_all(call, whole, receives ? blocks : Counts(map_.hosts.size(), 0), block, sent);
    if (receives) {
      const at::Tensor ordered = rank_ == root ? output : scratch_bytes(total);
      copy_to_group_order(ordered, whole, counts);
      whole = ordered;
    }
  }
  if (host_ != home || place == 0) return;
  near_scatter(call, rank_ == root ? output : scratch_bytes(0), whole, only_for(place, total), 0);
}

void HostLinks::scatter(HostCall& call, const at::Tensor& output, const at::Tensor& input,
                        const Counts& counts, int root) {
  const int home = map_.host_of[index(root)], place = map_.place_of[index(root)];
  const std::int64_t total = sum_of_counts(counts);
  at::Tensor whole = input;
  if (host_ == home && place != 0) {
    if (leads()) whole = scratch_bytes(total);
    near_gather(call, leads() ? whole : at::Tensor(), rank_ == root ? input : scratch_bytes(0),
                only_for(place, total), 0);
  }
  at::Tensor block;
  if (leads()) {
    const Counts blocks = per_host(counts);
    at::Tensor ordered = scratch_bytes(0);
    if (host_ == home) {
      ordered = scratch_bytes(total);
      copy_to_hosts_order(ordered, whole, counts);
    }
    block = scratch_bytes(blocks[index(host_)]);
    Counts received(map_.hosts.size(), 0);
    received[index(home)] = blocks[index(host_)];
    far_all_to_all(call, block, received, ordered,
                   host_ == home ? blocks : Counts(map_.hosts.size(), 0));
  }
  near_scatter(call, output, block, of_mates(counts), 0);
}

// ---- all-to-all ----

std::vector<HostLinks::Counts> HostLinks::near_counts(HostCall& call, const Counts& sent,
                                                      const Counts& awaited) {
  const auto n = static_cast<std::int64_t>(map_.size());
  const auto ranks = static_cast<std::int64_t>(mates().size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  auto mine = at::empty({2 * n}, options), all = at::empty({ranks * 2 * n}, options);
  auto* row = mine.mutable_data_ptr<std::int64_t>();
  std::copy(sent.begin(), sent.end(), row);
  std::copy(awaited.begin(), awaited.end(), row + n);
  if (near_)
    near_->_allgather_base(all, mine, near_options<c10d::AllgatherOptions>(call))->wait();
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
  throw FinalMismatch(concat("all_to_all: ranks called different things: rank ", from,
                             " of the group sends ", sent, " bytes to rank ", to,
                             ", which waits for ", awaited, "; make the sizes agree"));
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
  std::copy(sent.begin(), sent.end(), out.mutable_data_ptr<std::int64_t>());
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

void HostLinks::all_to_all(HostCall& call, const at::Tensor& output, const Counts& output_counts,
                           const at::Tensor& input, const Counts& input_counts) {
  const auto rows = near_counts(call, input_counts, output_counts);
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
    std::vector<at::Tensor> outputs, inputs;
    for (const int mate : mates()) {
      const auto m = index(mate);
      outputs.push_back(output.narrow(0, begin_out[m], output_counts[m]));
      inputs.push_back(input.narrow(0, begin_in[m], input_counts[m]));
    }
    near_->alltoall(outputs, inputs, near_options<c10d::AllToAllOptions>(call))->wait();
  } else {
    copy_range(output, begin_out[index(rank_)], input, begin_in[index(rank_)],
               input_counts[index(rank_)]);
  }
  all_to_all_far(call, output, output_counts, input, input_counts, rows);
}

void HostLinks::all_to_all_far(HostCall& call, const at::Tensor& output,
                               const Counts& output_counts, const at::Tensor& input,
                               const Counts& input_counts, const std::vector<Counts>& rows) {
  const auto n = index(map_.size()), hosts = map_.hosts.size();
  const auto far_sum = [&](const Counts& row, std::size_t first) {
    std::int64_t sum = 0;
    for (std::size_t rank = 0; rank < n; ++rank)
      if (map_.host_of[rank] != host_) sum += row[first + rank];
    return sum;
  };
  // What goes to other hosts, in the order of the hosts.
  const auto begin_in = begins_of(input_counts), begin_out = begins_of(output_counts);
  const auto packed = scratch_bytes(far_sum(input_counts, 0));
  std::int64_t at_packed = 0;
  for (std::size_t host = 0; host < hosts; ++host) {
    if (host == index(host_)) continue;
    for (const int rank : map_.hosts[host]) {
      copy_range(packed, at_packed, input, begin_in[index(rank)], input_counts[index(rank)]);
      at_packed += input_counts[index(rank)];
    }
  }
  Counts sent_by_mate, awaited_by_mate;
  for (const auto& row : rows) {
    sent_by_mate.push_back(far_sum(row, 0));
    awaited_by_mate.push_back(far_sum(row, n));
  }
  at::Tensor gathered, dealt;
  if (leads()) gathered = scratch_bytes(sum_of_counts(sent_by_mate));
  near_gather(call, gathered, packed, sent_by_mate, 0);
  if (leads()) {
    Counts to(hosts, 0), from(hosts, 0);
    const auto outgoing = scratch_bytes(gathered.numel());
    auto read = begins_of(sent_by_mate);
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
    const auto incoming = scratch_bytes(sum_of_counts(from));
    far_all_to_all(call, incoming, from, outgoing, to);
    // By host and sender, then by receiver, as it came; by receiver first, as it is dealt.
    dealt = scratch_bytes(incoming.numel());
    auto write = begins_of(awaited_by_mate);
    std::int64_t at_incoming = 0;
    for (std::size_t host = 0; host < hosts; ++host) {
      if (host == index(host_)) continue;
      for (const int sender : map_.hosts[host])
        for (std::size_t mate = 0; mate < rows.size(); ++mate) {
          const auto bytes = rows[mate][n + index(sender)];
          copy_range(dealt, write[mate], incoming, at_incoming, bytes);
          write[mate] += bytes;
          at_incoming += bytes;
        }
    }
  }
  const auto mine = scratch_bytes(far_sum(output_counts, 0));
  near_scatter(call, mine, dealt, awaited_by_mate, 0);
  std::int64_t at_mine = 0;
  for (std::size_t host = 0; host < hosts; ++host) {
    if (host == index(host_)) continue;
    for (const int rank : map_.hosts[host]) {
      copy_range(output, begin_out[index(rank)], mine, at_mine, output_counts[index(rank)]);
      at_mine += output_counts[index(rank)];
    }
  }
}

}  // namespace tessera::detail
