// Collectives that reduce. What a backend reduces exactly by itself is passed on unchanged;
// otherwise its recipe says how (reduction.h). What it composes is an all-gather (for reduce a
// gather), then a reduction in rank order here: n times the memory.
// reduce_scatter on such a backend: see backend_calls.h.

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/text.h"
#include "tessera/comm/group/detail/backend_calls.h"
#include "tessera/comm/group/detail/checks.h"
#include "tessera/comm/group/detail/collectives.h"
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
  CallCard card;
  card.dtype = t.scalar_type();
  card.device = t.device().type();
  card.op = static_cast<int>(op.kind);
  card.root = root;
  const auto rows = sizes.empty() || t.dim() == 0 ? 0 : t.size(0);
  card.elements = rows > 0 ? t.numel() / rows : t.numel();
  card.sizes = sizes;
  return card;
}

// Alone in the group: only a factor has an effect.
void reduce_alone(const at::Tensor& tensor, ReduceOp op) {
  if (op.kind == Kind::premultiplied)
    tensor.copy_(tensor.to(accumulation_type(tensor.scalar_type())).mul(op.factor));
}

// Hands one flat tensor to the backend's all-reduce (root < 0) or reduce.
void reduce_flat(RequestState& call, const at::Tensor& tensor, Kind op, double factor, int root) {
  const auto& endpoint = endpoint_for(call, tensor);
  std::vector<at::Tensor> tensors{tensor};
  if (root < 0)
    return hand_over<c10d::AllreduceOptions>(call, endpoint, [&](auto& options) {
      options.reduceOp = to_c10d(op, factor);
      return endpoint.backend->allreduce(tensors, options);
    });
  hand_over<c10d::ReduceOptions>(call, endpoint, [&](auto& options) {
    options.reduceOp = to_c10d(op, factor);
    options.rootRank = root;
    return endpoint.backend->reduce(tensors, options);
  });
}

// Gloo reduces in place on every rank, but only the root's tensor may change. With two ranks the
// other rank sends its values, and they are added here: as many bytes as in Gloo's reduce, and no
// copy. With more ranks a copy costs less than what the root would receive.
void reduce_pair(RequestState& call, const at::Tensor& work, const Recipe& recipe, int root) {
  const bool is_root = call.group().rank() == root;
  const std::int64_t count = work.numel() * wire_width(call, work);
  const auto nothing = at::empty({0}, work.options());
  Sizes received(2, 0), sent(2, 0);
  if (!is_root) {
    sent[root] = count;
    return all_to_all_counts(call, wire_input(call, nothing), wire_input(call, work), received,
                             sent);
  }
  received[1 - root] = count;
  const auto other = at::empty(work.sizes(), work.options());
  all_to_all_counts(call, wire_output(call, other), wire_input(call, nothing), received, sent);
  call.then([work, other, recipe, root] {
    reduce_in_order(work, root == 0 ? std::vector{work, other} : std::vector{other, work},
                    recipe.op);
    if (recipe.divide) work.div_(2);
  });
}

// Reduce-scatter of two ranks without scratch: what the other rank sends lands in the output, and
// this rank's rows are added where they lie.
void reduce_scatter_pair(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                         Kind op, const Sizes& counts) {
  const int me = call.group().rank(), peer = 1 - me;
  const auto width = wire_width(call, input);
  const auto source = is_plain(input) ? input : input.resolve_conj().resolve_neg().contiguous();
  const auto in = wire_input(call, source);
  const auto sends = split_flat(in, {counts[0] * width, counts[1] * width})[peer];
  Sizes received(2, 0), sent(2, 0);
  received[peer] = counts[me] * width;
  sent[peer] = counts[peer] * width;
  all_to_all_counts(call, wire_output(call, output), sends, received, sent);
  if (output.numel() == 0) return;
  const auto mine = split_flat(source.view({-1}), counts)[me].view(output.sizes());
  call.then([output, mine, me, op] {
    reduce_in_order(output, me == 0 ? std::vector{mine, output} : std::vector{output, mine}, op);
  });
}

// All-reduce (root < 0) or reduce of any tensor. `writes`: this rank's tensor gets the result.
void reduce_tensor(RequestState& call, const at::Tensor& tensor, ReduceOp op, int root,
                   bool writes) {
  const auto& abilities = call.group().endpoint(tensor.device().type()).abilities;
  const auto dtype = tensor.scalar_type();
  const Recipe recipe = recipe_of(abilities.reduces, dtype, op.kind);
  const int n = call.group().size();
  if (writes && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();

  // `work` holds the data that is reduced; if it is not the caller's memory it is copied back at
  // the end, which also rounds to the caller's dtype.
  const bool own = recipe.direct(dtype) && is_plain(tensor) && writes;
  const bool pair = root >= 0 && n == 2 && !abilities.keeps_inputs && recipe.direct(dtype);
  at::Tensor work;
  if (own) {
    work = tensor;
    if (recipe.scale) work.mul_(op.factor);
    call.keep(work);
  } else {
    work = tensor.resolve_conj().resolve_neg().to(recipe.wide).contiguous();
    if (recipe.scale) {
      work = work.mul(op.factor);
    } else if (!recipe.compose && !recipe.keys && work.is_alias_of(tensor) &&
               !abilities.keeps_inputs && !pair) {
      work = work.clone();  // Gloo works in place on every rank, and this tensor keeps its values
    }
    call.keep(work);
    if (writes && !recipe.keys && !work.is_alias_of(tensor)) call.copy_back(tensor, work);
  }

  if (pair) return reduce_pair(call, work, recipe, root);
  if (recipe.compose) {
    const auto in = wire_input(call, work);
    at::Tensor gathered;
    if (root < 0 || writes) gathered = at::empty({n * work.numel()}, work.options());
    if (root < 0) {
      all_gather_equal(call, wire_output(call, gathered), in);
    } else {
      rooted_equal(call, writes ? wire_output(call, gathered) : at::Tensor(), in, root, true);
    }
    if (writes)
      call.then([work, gathered, recipe, n] {
        reduce_in_order(work.view({-1}), split_flat(gathered, Sizes(n, work.numel())), recipe.op);
        if (recipe.divide) work.div_(n);
      });
    return;
  }
  const at::Tensor wire = recipe.wire(work);
  if (recipe.keys) call.keep(wire);
  reduce_flat(call, wire, recipe.op, op.factor, root);
  if (!writes) return;
  if (recipe.divide) call.then([work, n] { work.div_(n); });
  if (!recipe.keys) return;
  const auto result = work.is_alias_of(tensor) ? tensor : at::empty_like(work);
  call.then([result, wire, op = recipe.op] { from_order_keys(result.view({-1}), wire, op); });
  if (!result.is_same(tensor)) call.copy_back(tensor, result);
}

}  // namespace

void launch_all_reduce(RequestState& call, const at::Tensor& tensor, ReduceOp op) {
  begin(
      call,
      [&] {
        check_target(call, "the tensor", tensor);
        check_reducible(call.operation(), tensor.scalar_type(), op.kind);
        check_overlap(call, tensor, {});
      },
      [&] { return Signature{text_of(tensor, op), {}}; });
  call.set_card(reduce_card(tensor, op, -1));
  call.count_bytes(static_cast<std::int64_t>(tensor.nbytes()));
  if (tensor.numel() == 0) return;
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
        check_root(call, root);
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
  const auto& abilities = call.group().endpoint(input.device().type()).abilities;
  const auto dtype = input.scalar_type();
  Sizes counts(sizes);
  const std::int64_t rows = sizes.empty() ? n : input.size(0);
  if (sizes.empty()) counts.assign(n, 1);
  for (auto& c : counts) c = rows == 0 ? 0 : c * (input.numel() / rows);

  const Recipe recipe = recipe_of(abilities.reduces, dtype, op.kind);
  if (abilities.uneven && !recipe.compose && !recipe.keys && !recipe.real && !recipe.bytes) {
    auto in = input.resolve_conj().resolve_neg().to(recipe.wide);
    if (recipe.scale) in = in.mul(op.factor);
    in = in.contiguous().view({-1});
    at::Tensor out = recipe.wide == dtype
                         ? wire_output(call, output)
                         : at::empty({output.numel()}, output.options().dtype(recipe.wide));
    if (recipe.wide != dtype) call.copy_back(output, out);
    call.keep(in);
    call.keep(out);
    hand_over_uneven(call, endpoint_for(call, in), [&](UnevenBackend& uneven, CallLimit limit) {
      return uneven.reduce_scatter_v(out, in, counts, to_c10d(recipe.op, op.factor), limit);
    });
    if (recipe.divide) call.then([out, n] { out.div_(n); });
    return;
  }

  if (n == 2 && op.kind != Kind::premultiplied && is_plain(output))
    return reduce_scatter_pair(call, output, input, op.kind, counts);

  // Every rank gets its rows from every rank, and reduces them in rank order.
  auto source = input;
  if (op.kind == Kind::premultiplied) source = input.to(accumulation_type(dtype)).mul(op.factor);
  const auto in = wire_input(call, source);
  const auto scratch = at::empty({n * counts[me]}, source.options());
  const auto width = wire_width(call, source);
  Sizes in_counts(counts), out_counts(n, counts[me] * width);
  for (auto& c : in_counts) c *= width;
  call.keep(scratch);
  all_to_all_counts(call, wire_output(call, scratch), in, out_counts, in_counts);
  if (output.numel() == 0) return;
  if (!output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
  call.then([output, scratch, n, count = counts[me],
             kind = op.kind == Kind::premultiplied ? Kind::sum : op.kind] {
    auto parts = split_flat(scratch, Sizes(n, count));
    for (auto& part : parts) part = part.view(output.sizes());
    reduce_in_order(output, parts, kind);
  });
}

}  // namespace tessera::detail
