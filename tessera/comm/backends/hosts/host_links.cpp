#include "tessera/comm/backends/hosts/host_links.h"

#include <map>
#include <utility>

#include "tessera/comm/backends/hosts/host_steps.h"

namespace tessera::detail {

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
  Counts mine;
  for (const int rank : mates()) mine.push_back(counts[index(rank)]);
  return mine;
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

}  // namespace tessera::detail
