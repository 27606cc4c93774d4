// Recurrent layers. Their weights are used in every step: a sharded one is gathered once in forward
// and once in backward, and kept while its layer runs. Everything else is libtorch's own composite.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/_pad_packed_sequence.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <ATen/ops/stack.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <string_view>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/gathered_parameters.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail::recurrent_rules {
namespace {

using torch::autograd::variable_list;

// One call of a layer, for its backward: hooks of nodes share it.
struct Call {
  std::vector<at::Tensor> parameters;
  std::size_t at_a_time;
  std::shared_ptr<GatheredParameters> kept = {};

  void begin(const std::shared_ptr<Call>& self) {
    if (!kept || !kept->is_current_task()) {  // of a backward that an exception ended
      kept = std::make_shared<GatheredParameters>(parameters, at_a_time);
      torch::autograd::Engine::get_default_engine().queue_callback([self] { self->end(); });
    }
    if (GatheredParameters::current() != kept.get()) GatheredParameters::set_current(kept);
  }
  void end() {
    GatheredParameters::end(kept.get());
    kept.reset();
  }
};

// Runs before a node of the graph: the layer's last one begins its backward, the one that made its
// input ends it.
struct AtNode final : torch::autograd::FunctionPreHook {
  AtNode(std::shared_ptr<Call> c, bool b) : call(std::move(c)), begins(b) {}
  variable_list operator()(const variable_list& gradients) override {
    if (begins)
      call->begin(call);
    else
      call->end();
    return gradients;
  }
  std::shared_ptr<Call> call;
  bool begins;
};

template <class Run>
auto gathered_once(const at::Tensor& input, at::TensorList parameters, std::int64_t cells,
                   Run run) {
  const std::size_t at_a_time =
      parameters.size() / static_cast<std::size_t>(std::max<std::int64_t>(cells, 1));
  if (at_a_time == 0 || GatheredParameters(parameters, at_a_time).empty()) return run();
  const auto call = std::make_shared<Call>(Call{parameters.vec(), at_a_time});
  auto results = [&] {
    GatheredParameters::set_current(
        std::make_shared<GatheredParameters>(call->parameters, at_a_time));
    const auto reset = c10::make_scope_exit([] { GatheredParameters::set_current(nullptr); });
    return run();
  }();
  std::set<torch::autograd::Node*> hooked;
  std::apply(
      [&](const auto&... result) {
        const auto hook = [&](const at::Tensor& t) {
          if (t.grad_fn() && hooked.insert(t.grad_fn().get()).second)
            t.grad_fn()->add_pre_hook(std::make_unique<AtNode>(call, true));
        };
        (hook(result), ...);
      },
      results);
  if (!hooked.empty() && input.grad_fn())
    input.grad_fn()->add_pre_hook(std::make_unique<AtNode>(call, false));
  return results;
}

// A state that is the same on all ranks (zeros, if none was given) is sharded like the samples:
// otherwise the first step would move data.
at::Tensor sharded_as_samples(const at::Tensor& state, const at::Tensor& input, int batch) {
  const ShardMeta* meta = meta_of(input);
  if (!meta || input.dim() != 3 || state.dim() != 3 || !meta->spec().is_sharded(batch) ||
      state.size(1) != input.size(batch) || state.requires_grad())
    return state;
  const auto& context = context_of(meta->spec());
  if (!meta_of(state) && context->state->policies.promotion != Policy::allow) return state;
  const at::Tensor whole = meta_of(state) ? state : promote(state, context);
  if (!spec(whole).is_replicated()) return state;
  const DimSharding& samples = meta->spec().dim(batch);
  std::vector<Placement> placements(context->sizes.size());
  for (const int axis : samples.axes) placements[axis] = Shard(1);
  return redistribute(whole, make_spec(context, state.sizes().vec(), std::move(placements),
                                       {nullptr, &samples, nullptr}));
}

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Two = std::tuple<at::Tensor, at::Tensor>;
using One = const at::Tensor&;
using List = at::TensorList;

// An LSTM has two states.
std::vector<at::Tensor> sharded_as_samples(List states, const at::Tensor& input, int batch) {
  return mapped(states, [&](const at::Tensor& t) { return sharded_as_samples(t, input, batch); });
}

std::int64_t cells(std::int64_t layers, bool bidirectional) {
  return layers * (bidirectional ? 2 : 1);
}

template <class Results, class States>
using Steps = Results (*)(One, States, List, bool, std::int64_t, double, bool, bool, bool);
template <class Results, class States>
using PackedSteps = Results (*)(One, One, States, List, bool, std::int64_t, double, bool, bool);

template <class Results, class States, Steps<Results, States> native>
Results recurrent(const at::Tensor& x, States hx, List w, bool biases, std::int64_t layers,
                  double p, bool train, bool both, bool batch_first) {
  const auto states = sharded_as_samples(hx, x, batch_first ? 0 : 1);
  return gathered_once(x, w, cells(layers, both), [&] {
    return native(x, states, w, biases, layers, p, train, both, batch_first);
  });
}
template <class Results, class States, PackedSteps<Results, States> native>
Results recurrent_packed(const at::Tensor& x, const at::Tensor& sizes, States hx, List w,
                         bool biases, std::int64_t layers, double p, bool train, bool both) {
  return gathered_once(x, w, cells(layers, both),
                       [&] { return native(x, sizes, hx, w, biases, layers, p, train, both); });
}

// One direction of one layer of an LSTM. The contributions of the input to the gates of all steps
// are computed at once.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> mkldnn_rnn_layer(
    const at::Tensor& input, const at::Tensor& weight_input, const at::Tensor& weight_hidden,
    const at::Tensor& bias_input, const at::Tensor& bias_hidden, const at::Tensor& hx,
    const at::Tensor& cx, bool reverse, at::IntArrayRef batch_sizes, std::int64_t mode,
    std::int64_t, std::int64_t, bool has_biases, bool, bool, bool) {
  constexpr std::int64_t kLstm = 2;
  TORCH_CHECK(
      mode == kLstm && batch_sizes.empty(),
      "mkldnn_rnn_layer of sharded tensors: only of an LSTM, of sequences that are not packed");
  const auto gates = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return has_biases ? at::linear(x, weight, bias) : at::linear(x, weight);
  };
  const std::vector<at::Tensor> of_input = gates(input, weight_input, bias_input).unbind(0);
  std::vector<at::Tensor> output(of_input.size());
  at::Tensor h = hx, c = cx;
  for (std::size_t i = 0; i < output.size(); ++i) {
    const std::size_t step = reverse ? output.size() - 1 - i : i;
    const auto g = (of_input[step] + gates(h, weight_hidden, bias_hidden)).chunk(4, -1);
    c = g[1].sigmoid() * c + g[0].sigmoid() * g[2].tanh();
    h = g[3].sigmoid() * c.tanh();
    output[step] = h;
  }
  return {at::stack(output), h, c, at::empty({0}, at::kByte)};
}

// ----
// Packed sequences: the steps of samples of different lengths, one after the other.

// The source of each packed step follows from the lengths alone, which are plain and the same on
// all ranks, as are the sizes of the batches that are returned: the program reads them.
std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& input, const at::Tensor& lengths,
                                        bool batch_first) {
  if (input.dim() < 2)
    throw InvalidArgument("_pack_padded_sequence of a tensor of ", input.dim(),
                          " dims: it needs samples and steps");
  const at::Tensor plain = is_sharded(lengths) ? full_tensor(lengths) : lengths;
  const auto rows = input.size(0), columns = input.size(1);
  const at::Tensor places = at::arange(rows * columns, at::kLong).view({rows, columns});
  const auto [from, sizes] = at::_pack_padded_sequence(places, plain, batch_first);
  return {input.flatten(0, 1).index_select(0, from.to(input.device())), sizes};
}

// The inverse: index zero is the padding, packed steps count from one.
std::tuple<at::Tensor, at::Tensor> unpack(const at::Tensor& data, const at::Tensor& batch_sizes,
                                          bool batch_first, const at::Scalar& padding,
                                          std::int64_t total_length) {
  const at::Tensor sizes = is_sharded(batch_sizes) ? full_tensor(batch_sizes) : batch_sizes;
  const auto steps = data.size(0);
  const auto [from, lengths] = at::_pad_packed_sequence(at::arange(1, steps + 1, at::kLong), sizes,
                                                        /*batch_first=*/false, 0, total_length);
  std::vector<std::int64_t> shape = from.sizes().vec(), mask(from.sizes().vec());
  for (std::int64_t d = 1; d < data.dim(); ++d) {
    shape.push_back(data.size(d));
    mask.push_back(1);
  }
  const at::Tensor at = from.reshape({-1}).to(data.device());
  const at::Tensor rows = data.index_select(0, (at - 1).clamp_min(0)).view(shape);
  const at::Tensor padded = rows.masked_fill(at.eq(0).view(mask), padding);
  return {batch_first ? padded.transpose(0, 1) : padded, lengths};
}

at::Tensor pad_sequence(at::TensorList sequences, bool batch_first, double padding,
                        std::string_view side) {
  if (side != "left" && side != "right")
    throw InvalidArgument("pad_sequence: padding_side is '", side, "'; left or right");
  std::int64_t longest = 0;
  for (const at::Tensor& t : sequences) longest = std::max(longest, t.size(0));
  std::vector<at::Tensor> padded;
  for (const at::Tensor& t : sequences) {
    std::vector<std::int64_t> pad(2 * static_cast<std::size_t>(t.dim()), 0);
    pad[pad.size() - (side == "left" ? 2 : 1)] = longest - t.size(0);
    padded.push_back(at::constant_pad_nd(t, pad, padding));
  }
  return at::stack(padded, batch_first ? 0 : 1);
}

const AtStart registered([] {
  register_decomposition("lstm.input", recurrent<Three, List, at::native::lstm>);
  register_decomposition("lstm.data", recurrent_packed<Three, List, at::native::lstm>);
  register_decomposition("gru.input", recurrent<Two, One, at::native::gru>);
  register_decomposition("gru.data", recurrent_packed<Two, One, at::native::gru>);
  register_decomposition("rnn_tanh.input", recurrent<Two, One, at::native::rnn_tanh>);
  register_decomposition("rnn_tanh.data", recurrent_packed<Two, One, at::native::rnn_tanh>);
  register_decomposition("rnn_relu.input", recurrent<Two, One, at::native::rnn_relu>);
  register_decomposition("rnn_relu.data", recurrent_packed<Two, One, at::native::rnn_relu>);
  register_decomposition("mkldnn_rnn_layer", mkldnn_rnn_layer);
  register_decomposition("_pack_padded_sequence", pack);
  register_decomposition("_pad_packed_sequence", unpack);
  register_decomposition("pad_sequence", pad_sequence);
});

}  // namespace
}  // namespace tessera::detail::recurrent_rules
