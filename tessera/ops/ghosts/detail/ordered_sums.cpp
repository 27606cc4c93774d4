#include "tessera/ops/ghosts/detail/ordered_sums.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "tessera/ops/ghosts/detail/ghost_state.h"
#include "tessera/tensor/dispatch/internal/kernels.h"

namespace tessera::detail {
namespace {

// What memory that carries an order is the context of.
struct OrderedNumbers {
  std::vector<std::int64_t> numbers;
  SumOrder order;
  static void free(void* it) { delete static_cast<OrderedNumbers*>(it); }
};

template <class T>
void add_rows(const OrderedSums& sums, const at::Tensor& result, const at::Tensor& here,
              const at::Tensor& arrived, std::int64_t width) {
  using Sum = at::opmath_type<T>;
  T* const to = result.mutable_data_ptr<T>();
  const T* const own = here.const_data_ptr<T>();
  const T* const others = arrived.const_data_ptr<T>();
  const std::int64_t places = here.size(0), rows = result.size(0);
  const auto each = static_cast<std::int64_t>(sums.summands.size()) / rows + 1;
  at::parallel_for(0, rows, 65536 / (each * width) + 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Sum> sum(static_cast<std::size_t>(width));
    for (std::int64_t r = begin; r < end; ++r) {
      if (sums.first[r] == sums.first[r + 1]) continue;
      std::copy_n(to + r * width, width, sum.begin());
      for (std::int64_t i = sums.first[r]; i < sums.first[r + 1]; ++i) {
        const std::int64_t at = sums.summands[i];
        const T* const from = at < places ? own + at * width : others + (at - places) * width;
        for (std::int64_t j = 0; j < width; ++j) sum[j] += static_cast<Sum>(from[j]);
      }
      std::ranges::transform(sum, to + r * width, [](Sum s) { return static_cast<T>(s); });
    }
  });
}

}  // namespace

at::Tensor with_order(std::vector<std::int64_t> numbers, std::int64_t rows, SumOrder order) {
  const auto columns = static_cast<std::int64_t>(numbers.size()) / rows;
  numbers.reserve(1);  // memory without a place has no context
  auto* const it = new OrderedNumbers{std::move(numbers), std::move(order)};
  return at::for_blob(it->numbers.data(), {rows, columns})
      .context(it, &OrderedNumbers::free)
      .options(at::kLong)
      .make_tensor();
}

SumOrder order_of(const at::Tensor& local) {
  const auto* const it =
      local.storage().data_ptr().cast_context<OrderedNumbers>(&OrderedNumbers::free);
  return it ? it->order : nullptr;
}

std::shared_ptr<const OrderedSums> ordered_sums(const Group& group, const Partition& rows,
                                                std::span<const std::int64_t> ids, SumOrder order) {
  auto sums = std::make_shared<OrderedSums>();
  sums->order = std::move(order);
  const Interval own = rows.interval(group.rank());
  // Owned row, number in the order, place: the summands of this rank's rows.
  std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> all;
  std::vector<std::pair<int, std::int64_t>> leaving;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto place = static_cast<std::int64_t>(i);
    if (ids[i] >= own.begin && ids[i] < own.end)
      all.emplace_back(ids[i] - own.begin, (*sums->order)[i], place);
    else
      leaving.emplace_back(rows.owner(ids[i]), place);
  }
  std::ranges::sort(leaving);
  IdsByRank sent{std::vector<std::int64_t>(static_cast<std::size_t>(group.size())), {}};
  std::vector<std::int64_t> places;
  for (const auto& [owner, place] : leaving) {
    sent.counts[owner] += 2;
    sent.values.insert(sent.values.end(), {ids[place] - rows.begin(owner), (*sums->order)[place]});
    places.push_back(place);
  }
  const IdsByRank arrived = group.size() > 1 ? carried_by(group, sent) : sent;
  for (std::size_t k = 0; k < arrived.values.size(); k += 2)
    all.emplace_back(arrived.values[k], arrived.values[k + 1],
                     static_cast<std::int64_t>(ids.size() + k / 2));
  const auto pieces_of = [](const std::vector<std::int64_t>& counts) {
    std::vector<PeerPiece> pieces;
    for (std::size_t r = 0; r < counts.size(); ++r)
      if (counts[r] > 0) pieces.push_back({static_cast<int>(r), {counts[r] / 2}});
    return pieces;
  };
  sums->peers = std::make_shared<PeerExchange>(pieces_of(sent.counts), pieces_of(arrived.counts));
  sums->travels = !sent.values.empty() || !arrived.values.empty();
  sums->leaving = at::tensor(places, at::kLong);
  std::ranges::sort(all);
  sums->first.resize(static_cast<std::size_t>(own.size()) + 1);
  for (const auto& [row, number, place] : all) {
    ++sums->first[row + 1];
    sums->summands.push_back(place);
  }
  for (std::size_t r = 1; r < sums->first.size(); ++r) sums->first[r] += sums->first[r - 1];
  return sums;
}

at::Tensor summed_in_order(const OrderedSums& sums, const Group& group, const at::Tensor& rows,
                           const at::Tensor& source) {
  const LocalCallGuard guard;
  const at::Tensor here = source.contiguous();
  at::Tensor result = rows.clone(at::MemoryFormat::Contiguous);
  PeerTransfer transfer{sums.peers, {}, {}};
  at::Tensor arrived = here.narrow(0, 0, 0);
  if (sums.travels) {
    auto shape = here.sizes().vec();
    auto& buffers = *(transfer.buffers = sums.peers->take(here, here.sizes().slice(1)));
    shape[0] = sums.leaving.size(0);
    at::Tensor leaving = buffers.sent.view(shape);
    at::index_select_out(leaving, here, 0, sums.leaving);
    transfer.request = group.started().exchange(buffers.messages, {.name = "ordered_sums"});
    transfer.request.wait();
    arrived = buffers.received;
  }
  if (result.numel() == 0 || sums.summands.empty()) return result;
  AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND2(
      at::kHalf, at::kBFloat16, result.scalar_type(), "ordered_sums",
      [&] { add_rows<scalar_t>(sums, result, here, arrived, result.numel() / result.size(0)); });
  return result;
}

}  // namespace tessera::detail
