// What stock_library.py and tests/python/test_checkpoint.py ask of the library:
//   checkpoint_stock_helper write FOLDER   a checkpoint of 3 ranks, and the same in one file
//   checkpoint_stock_helper read FILE      checks what Python has written
//   checkpoint_stock_helper Adam FOLDER    goes on from the checkpoint "python" on 3 ranks, and
//                                          saves "c++"; or AdamW, SGD, RMSprop, Adagrad
// Every value is its position: element i of a tensor is i (i % 2 for bools).

#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/file.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/comm/job/threads.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using namespace tessera;

const std::vector<std::pair<std::string, at::ScalarType>> kStockDtypes{
    {"float64", at::kDouble},
    {"float32", at::kFloat},
    {"float16", at::kHalf},
    {"bfloat16", at::kBFloat16},
    {"int64", at::kLong},
    {"int32", at::kInt},
    {"int16", at::kShort},
    {"int8", at::kChar},
    {"uint8", at::kByte},
    {"uint16", at::kUInt16},
    {"uint32", at::kUInt32},
    {"uint64", at::kUInt64},
    {"bool", at::kBool},
    {"complex64", at::kComplexFloat},
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2}};

at::Tensor counted(at::ScalarType dtype) {
  const at::Tensor i = at::arange(15, at::kFloat).view({5, 3});
  return (dtype == at::kBool ? i.remainder(2) : i).to(dtype);
}

void write(const std::string& folder) {
  run_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    CheckpointState state;
    for (const auto& [name, dtype] : kStockDtypes) {
      const ShardSpec rows(mesh, {5, 3}, {Shard(0)}, {{0, {3, 0, 2}}});
      const at::Tensor mine =
          counted(dtype).narrow(0, rows.local_offset()[0], rows.local_shape()[0]).contiguous();
      state.add(name, from_local(mine, rows));
    }
    state.add("plain", counted(at::kFloat)).set_integer("step", 3);
    Checkpointer(manager, folder).save("c", state);
    CheckpointReader(manager.world(), folder, "c").export_file(folder + "/one.safetensors");
    save({{"w", distribute_tensor(counted(at::kFloat), mesh, {Shard(1)})}}, mesh,
         folder + "/saved.safetensors");
  });
}

void read(const std::string& file) {
  run_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const NamedTensors all = load(mesh, file);
    if (all.size() != kStockDtypes.size()) throw Error("another number of tensors");
    const CheckpointReader saved(manager.world(), file);
    for (const auto& [name, dtype] : kStockDtypes) {
      const at::Tensor expected = counted(dtype);
      const at::Tensor got = to_local(saved.read(name, ShardSpec::replicated(mesh, {5, 3})));
      if (got.scalar_type() != dtype ||
          std::memcmp(got.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()) != 0)
        throw Error(name, " has come back as something else");
    }
  });
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& kind,
                                                      const std::vector<at::Tensor>& p) {
  // Their options come back from the checkpoint.
  if (kind == "Adam") return std::make_unique<torch::optim::Adam>(p);
  if (kind == "AdamW") return std::make_unique<torch::optim::AdamW>(p);
  if (kind == "SGD") return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(1));
  if (kind == "RMSprop") return std::make_unique<torch::optim::RMSprop>(p);
  if (kind == "Adagrad") return std::make_unique<torch::optim::Adagrad>(p);
  throw Error("write, read or the name of an optimizer is needed, not " + kind);
}

void go_on(const std::string& kind, const std::string& folder) {
  run_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    torch::nn::Sequential net(torch::nn::Linear(4, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2));
    net->to(at::kDouble);
    distribute_module(
        *net, mesh,
        [](const std::string& name, const at::Tensor&) -> std::optional<ParameterPlacement> {
          if (name != "0.weight") return std::nullopt;
          return ParameterPlacement{{Shard(0)}, {{0, {4, 0, 1}}}};
        });
    const auto optimizer = optimizer_of(kind, net->parameters());
    const CheckpointReader saved(manager.world(), folder, "python");
    CheckpointState state;
    state.add("net.", *net);
    saved.load(state, {.allow_extra = true});
    load_optimizer(saved, "optimizer.", *optimizer, *net);
    const std::int64_t begin = state.get_integer("step");
    if (state.get("text") != "ein Wort" || state.get_real("real") != 0.1)
      throw Error("the values have come back as something else");
    for (std::int64_t i = begin; i < begin + 2; ++i) {
      const at::Tensor x = (at::arange(24, at::kDouble) + i).sin().view({6, 4});
      optimizer->zero_grad();
      net->forward(distribute_tensor(x, mesh, {Shard(0)})).square().mean().backward();
      optimizer->step();
    }
    CheckpointState now;
    now.add("net.", *net).set_integer("step", begin + 2).set("text", "ein Wort");
    now.set_real("real", 0.1);
    add_optimizer(now, "optimizer.", *optimizer, *net);
    Checkpointer(manager, folder).save("c++", now);
  });
}

}  // namespace

int main(int count, char** arguments) {
  try {
    if (count != 3) throw tessera::Error("two arguments: write FOLDER, read FILE, or Adam FOLDER");
    const std::string what = arguments[1];
    if (what == "write")
      write(arguments[2]);
    else if (what == "read")
      read(arguments[2]);
    else
      go_on(what, arguments[2]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
