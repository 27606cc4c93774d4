// Collectives that reduce. What a transport reduces exactly by itself is passed on unchanged;
// otherwise its recipe says how (reduction.h). What it composes is an all-gather (for reduce a
// gather), then a reduction in rank order here, n times the memory; of reduce-scatter an
// all-to-all.

#include <ATen/ATen.h>

#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/group/detail/checks.h"
#include "tessera/comm/group/detail/collectives.h"
#include "tessera/comm/group/detail/hand_over.h"
#include "tessera/comm/group/detail/memory.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {
namespace {

using Guard = at::AutoDispatchBelowADInplaceOrView;
using Kind = ReduceOp::Kind;

std::string text_of(const at::Tensor& t, ReduceOp op) {
  return concat(", ", to_string(op.kind), ", ", c10::toString(t.scalar_type()), t.sizes(), " on ",
                c10::DeviceTypeName(t.device().type()));
}

CallCard reduce_card(const at::Tensor& t, ReduceOp op, int root, const Sizes& sizes = {}) {
  CallCard card = card_of(t, root, sizes);
  card.op = static_cast<int>(op.kind);
  return card;
}

// Alone in the group: only a factor has an effect.
void reduce_alone(const at::Tensor& tensor, ReduceOp op) {
  if (op.kind == Kind::premultiplied)
    tensor.copy_(tensor.to(accumulation_type(tensor.scalar_type())).mul(op.factor));
}

// All-reduce (root < 0) or reduce of any tensor. `writes`: this rank's tensor gets the result.
void reduce_tensor(RequestState& call, const at::Tensor& tensor, ReduceOp op, int root,
                   bool writes) {
  const auto& endpoint = endpoint_for(call, tensor);
  const Recipe recipe = recipe_of(endpoint.abilities.reduces, tensor.scalar_type(), op);
  const int n = call.group().size();
  if (writes && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  const at::Tensor wire = recipe.outgoing(tensor, writes);
  call.keep(wire);
  TransportCall given;
  given.root = root;
  if (recipe.compose) {
    given.input = wire_input(call, wire);
    given.counts.assign(n, given.input.numel());
    at::Tensor gathered;
    if (writes) {
      gathered = at::empty({n * wire.numel()}, wire.options());
      given.output = wire_output(call, gathered);
    }
    hand_over(call, endpoint, given, root < 0 ? &Transport::all_gather : &Transport::gather);
    if (writes)
      call.then([wire, gathered, n, kind = recipe.op.kind] {
        reduce_in_order(wire.view({-1}), split_flat(gathered, Sizes(n, wire.numel())), kind);
      });
  } else {
    given.output = wire;
    given.op = recipe.op;
    hand_over(call, endpoint, given, root < 0 ? &Transport::all_reduce : &Transport::reduce);
  }
  if (writes && recipe.settles(tensor, wire))
    call.then([tensor, wire, recipe, n] { recipe.settle(tensor, wire, n); });
}

// A call whose result takes the place of each rank's summand; false: there is nothing to reduce.
bool begin_in_place(RequestState& call, const at::Tensor& tensor, ReduceOp op, bool scans = false) {
  begin(
      call,
      [&] {
        check_target(call, "the tensor", tensor);
        check_reducible(call.operation(), tensor.scalar_type(), op.kind);
        if (scans && op.kind == Kind::avg)
          refuse(call, "the number of summands differs between ranks; divide the sums");
        check_overlap(call, tensor, {});
      },
      [&] { return Signature{text_of(tensor, op), {}}; });
  call.set_card(reduce_card(tensor, op, -1));
  call.count_bytes(static_cast<std::int64_t>(tensor.nbytes()));
  return tensor.numel() > 0;
}

}  // namespace

void launch_all_reduce(RequestState& call, const at::Tensor& tensor, ReduceOp op) {
  if (!begin_in_place(call, tensor, op)) return;
  const Guard guard;
  if (call.group().size() == 1) return reduce_alone(tensor, op);
  reduce_tensor(call, tensor, op, -1, true);
}

void launch_reduce(RequestState& call, const at::Tensor& given, int root, ReduceOp op) {
  const bool is_root = call.group().rank() == root;
  begin(
      call,
      [&] {
        (is_root ? check_target : check_tensor)(call, "the tensor", given);
        check_rank(call, "root", root);
        check_reducible(call.operation(), given.scalar_type(), op.kind);
        if (is_root) check_overlap(call, given, {});
      },
      [&] { return Signature{concat(text_of(given, op), ", root ", root), {}}; });
  const at::Tensor tensor = in_memory(given);
  call.set_card(reduce_card(tensor, op, root));
  call.count_bytes(static_cast<std::int64_t>(tensor.nbytes()));
  if (tensor.numel() == 0) return;
  const Guard guard;
  if (call.group().size() == 1) return reduce_alone(tensor, op);
  reduce_tensor(call, tensor, op, root, is_root);
}

void launch_reduce_scatter(RequestState& call, const at::Tensor& output, const at::Tensor& given,
                           ReduceOp op, const Sizes& sizes) {
  begin(
      call,
      [&] {
        check_target(call, "the output", output);
        check_tensor(call, "the input", given);
        check_alike(call, output, given);
        check_sizes(call, given, output, sizes);
        check_reducible(call.operation(), given.scalar_type(), op.kind);
        check_overlap(call, output, given);
      },
      [&] {
        return Signature{sizes.empty()
                             ? text_of(given, op)
                             : concat(text_of(given, op), ", sizes ", list(sizes, 1 << 20)),
                         {}};
      });
  const at::Tensor input = in_memory(given);
  call.set_card(reduce_card(input, op, -1, sizes));
  call.count_bytes(static_cast<std::int64_t>(input.nbytes()));
  if (input.numel() == 0) return;
  const Guard guard;
  const int n = call.group().size(), me = call.group().rank();
  if (n == 1) {
    output.copy_(input.reshape(output.sizes()));
    return reduce_alone(output, op);
  }
  const auto& endpoint = endpoint_for(call, input);
  const auto& can = endpoint.abilities;
  const Recipe recipe =
      recipe_of(can.reduce_scatters ? can.reduce_scatters : can.reduces, input.scalar_type(), op);
  TransportCall handed;
  handed.input = flat(recipe.outgoing(input, false));
  handed.op = recipe.op;
  const std::int64_t rows = sizes.empty() ? n : input.size(0);
  handed.counts = times(sizes.empty() ? Sizes(n, 1) : sizes,
                        rows == 0 ? 0 : input.numel() / rows * recipe.width());
  const bool direct = recipe.wire_type() == output.scalar_type() && is_plain(output);
  const at::Tensor result =
      direct ? flat(output)
             : at::empty({handed.counts[me]}, output.options().dtype(recipe.wire_type()));
  handed.output = result;
  call.keep(handed.input);
  call.keep(result);
  if (!output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
  hand_over(call, endpoint, handed,
            recipe.compose ? &Transport::compose_reduce_scatter : &Transport::reduce_scatter);
  if (output.numel() > 0 && recipe.settles(output, result))
    call.then([output, result, recipe, n] { recipe.settle(output, result, n); });
}

void launch_scan(RequestState& call, const at::Tensor& tensor, ReduceOp op) {
  if (!begin_in_place(call, tensor, op, /*scans=*/true)) return;
  const Guard guard;
  const int n = call.group().size(), me = call.group().rank();
  if (n == 1) return reduce_alone(tensor, op);
  const Recipe recipe = recipe_of(reduces_in_order, tensor.scalar_type(), op);
  const at::Tensor mine = recipe.outgoing(tensor, false);
  const at::Tensor gathered = at::empty({n * mine.numel()}, mine.options());
  TransportCall handed;
  handed.input = wire_input(call, mine);
  handed.output = wire_output(call, gathered);
  handed.counts.assign(n, handed.input.numel());
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  hand_over(call, endpoint_for(call, tensor), handed, &Transport::all_gather);
  call.then([tensor, gathered, recipe, me, count = mine.numel()] {
    const at::Tensor result = at::empty({count}, gathered.options());
    reduce_in_order(result, split_flat(gathered, Sizes(me + 1, count)), recipe.op.kind);
    recipe.settle(tensor, result, me + 1);
  });
}

}  // namespace tessera::detail
