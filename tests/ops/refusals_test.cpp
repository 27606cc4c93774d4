// What plain libtorch refuses is refused on every rank, also on those whose shard has nothing to
// do, before anything is sent: the next collective works.

#include <ATen/record_function.h>
#include <torch/library.h>

#include <atomic>

#include "support.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::test::refusals_test {

namespace {

using Call = std::function<void(const std::function<at::Tensor(at::Tensor)>& placed)>;

// `call` builds its arguments, and passes each through `placed`.
void refused(const char* what, const Call& call) {
  EXPECT_ANY_THROW(call([](at::Tensor t) { return t; })) << what << ": plain libtorch takes it";
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    const auto placed = [&](const at::Tensor& t) {
      if (t.dim() == 0) return distribute_tensor(t, ShardSpec::replicated(mesh, {}));
      const int d = static_cast<int>(t.dim()) - 1 - (t.dim() > 2);  // of a field: a spatial dim
      return distribute_tensor(t,
                               ShardSpec(mesh, t.sizes().vec(), {Shard(d)}, {{d, {t.size(d), 0}}}));
    };
    EXPECT_ANY_THROW(call(placed)) << what << " on rank " << manager.rank();
    const at::Tensor ones = at::ones({3}, at::kDouble);
    EXPECT_EQ(full_tensor(placed(ones)).sum().item<double>(), 3)
        << what << ": rank " << manager.rank() << " cannot go on";
  });
}

}  // namespace

TEST(Refusals, OfIndexing) {
  const at::Tensor two = at::arange(2, at::kLong);
  refused("put of three values at two indices",
          [&](auto placed) { placed(at::zeros({8})).put_(placed(two), placed(at::ones({3}))); });
  refused("put of doubles into floats", [&](auto placed) {
    placed(at::zeros({8})).put_(placed(two), placed(at::ones({2}, at::kDouble)));
  });
  refused("put at int32 indices", [&](auto placed) {
    placed(at::zeros({8})).put_(placed(two.to(at::kInt)), placed(at::ones({2})));
  });
  refused("more indices than dims", [&](auto placed) {
    placed(at::zeros({8})).index_put_({placed(two), placed(two)}, placed(at::ones({2})));
  });
  const at::Tensor mask = at::ones({8}, at::kBool);
  refused("masked_scatter of doubles", [&](auto placed) {
    placed(at::zeros({8})).masked_scatter_(placed(mask), placed(at::ones({8}, at::kDouble)));
  });
  refused("masked_scatter by bytes", [&](auto placed) {
    placed(at::zeros({8})).masked_scatter_(placed(mask.to(at::kByte)), placed(at::ones({8})));
  });
}

// Where an argument speaks of sizes, and where a number is at fault.
TEST(Refusals, OfDtypes) {
  const at::Tensor image = at::ones({1, 4, 6, 6}), weight = at::ones({4, 2, 3, 3}, at::kDouble);
  const std::vector<std::int64_t> one = {1, 1}, none = {0, 0};
  refused("grouped conv2d by doubles",
          [&](auto placed) { at::conv2d(placed(image), placed(weight), {}, one, none, one, 2); });
  refused("grouped conv_transpose2d by doubles", [&](auto placed) {
    at::conv_transpose2d(placed(image), placed(weight), {}, one, none, none, 2);
  });
  refused("max_pool2d of booleans",
          [&](auto placed) { at::max_pool2d(placed(image.to(at::kBool)), {2, 2}); });
  refused("avg_pool2d of integers",
          [&](auto placed) { at::avg_pool2d(placed(image.to(at::kInt)), {2, 2}); });
  refused("adaptive_avg_pool2d of integers",
          [&](auto placed) { at::adaptive_avg_pool2d(placed(image.to(at::kInt)), {2, 2}); });
  refused("im2col of integers", [&](auto placed) {
    at::im2col(placed(image.to(at::kInt)), {2, 2}, {1, 1}, {0, 0}, {1, 1});
  });
  const at::Tensor vector = at::ones({6});
  refused("col2im of integers", [&](auto placed) {
    at::col2im(placed(at::ones({1, 4, 9}, at::kInt)), {4, 4}, {2, 2}, {1, 1}, {0, 0}, {1, 1});
  });
  refused("topk of complex numbers",
          [&](auto placed) { at::topk(placed(vector.to(at::kComplexFloat)), 2); });
  refused("topk of booleans", [&](auto placed) { at::topk(placed(vector.to(at::kBool)), 2); });
  refused("kthvalue of complex numbers",
          [&](auto placed) { at::kthvalue(placed(vector.to(at::kComplexFloat)), 2); });
  refused("cross of floats and doubles", [&](auto placed) {
    at::linalg_cross(placed(at::ones({6, 3})), placed(at::ones({6, 3}, at::kDouble)));
  });
  const at::Tensor whole_numbers = at::ones({6}, at::kLong);
  refused("and with a fraction",
          [&](auto placed) { at::bitwise_and(placed(whole_numbers), at::Scalar(2.5)); });
  refused("greater than a complex number",
          [&](auto placed) { at::gt(placed(vector), at::Scalar(c10::complex<double>(0, 1))); });
  refused("division of whole numbers by zero",
          [&](auto placed) { at::floor_divide(placed(whole_numbers), at::Scalar(0)); });
}

// Of the plain tensors that operators on this thread make, the most elements of one.
class Largest {
 public:
  Largest()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&start, &end)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {
    elements() = 0;
  }
  ~Largest() { at::removeCallback(handle_); }
  Largest(const Largest&) = delete;
  Largest& operator=(const Largest&) = delete;
  static std::int64_t& elements() {
    static thread_local std::int64_t most = 0;
    return most;
  }

 private:
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction&) { return nullptr; }
  static void end(const at::RecordFunction& function, at::ObserverContext*) {
    for (const c10::IValue& v : function.outputs()) {
      if (v.isTensor() && v.toTensor().defined() && !is_sharded(v.toTensor()) &&
          !v.toTensor().is_meta())
        elements() = std::max(elements(), v.toTensor().numel());
    }
  }
  at::CallbackHandle handle_;
};

TEST(Refusals, TryNothingLarge) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = leaf(at::ones({4096, 64}), ShardSpec(mesh, {4096, 64}, {Shard(0)}));
    for (const auto& f : std::vector<std::function<at::Tensor()>>{
             [&] { return x.select(1, 3); }, [&] { return x.slice(1, 0, 5); },
             [&] { return x.unfold(1, 4, 2); }}) {
      const at::Tensor y = f(), gradient = y.detach().clone();  // sharded as it is
      const Largest watched;
      y.backward(gradient);
      EXPECT_LT(Largest::elements(), 4096 * 64);
    }
  });
}

std::atomic<int> notes = 0;
TORCH_LIBRARY(tessera_refusals_test, m) { m.def("note(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(tessera_refusals_test, CPU, m) {
  m.impl("note", [](const at::Tensor& x) {
    ++notes;
    return x.clone();
  });
}

TEST(Refusals, RunAUsersKernelOnce) {
  register_rule("tessera_refusals_test::note", [](const OpCall& call) {
    Plan plan;
    plan.outputs = {{call.tensor(0).spec}};
    return plan;
  });
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const auto note = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("tessera_refusals_test::note", "")
                          .typed<at::Tensor(const at::Tensor&)>();
    note.call(distribute_tensor(at::ones({4}), mesh, {Shard(0)}));
  });
  EXPECT_EQ(notes, 2) << "once on each rank";
}

TEST(Refusals, OfWrongNumbersOfDims) {
  const at::Tensor vector = at::ones({6}), matrix = at::ones({6, 4});
  refused("cat of sums",
          [&](auto placed) { at::cat({placed(matrix).sum(), placed(matrix).mean()}); });
  refused("cat of a number and a vector",
          [&](auto placed) { at::cat({placed(vector).sum(), placed(vector)}); });
  refused("mm of a vector", [&](auto placed) { at::mm(placed(vector), placed(matrix)); });
  refused("bmm of matrices", [&](auto placed) { at::bmm(placed(matrix), placed(matrix)); });
  refused("mv of vectors", [&](auto placed) { at::mv(placed(vector), placed(vector)); });
  refused("mm of sizes that differ", [&](auto placed) { at::mm(placed(matrix), placed(matrix)); });
  refused("addmv of a vector",
          [&](auto placed) { at::addmv(placed(vector), placed(vector), placed(vector)); });
  refused("addbmm onto another shape", [&](auto placed) {
    at::addbmm(placed(at::ones({3, 4})), placed(at::ones({2, 6, 4})), placed(at::ones({2, 4, 4})));
  });
  refused("linear of inner sizes 1 and 4",
          [&](auto placed) { at::linear(placed(at::ones({2, 6, 1})), placed(at::ones({3, 4}))); });
  refused("repeat by too few", [&](auto placed) { placed(matrix).repeat({2}); });
  refused("repeat by none",
          [&](auto placed) { placed(matrix).repeat(std::vector<std::int64_t>{}); });
  refused("layer_norm over more dims than there are",
          [&](auto placed) { at::layer_norm(placed(vector), {3, 6}); });
  refused("layer_norm over another size",
          [&](auto placed) { at::layer_norm(placed(matrix), {3}); });
  refused("split of a sum", [&](auto placed) { placed(vector).sum().split(1); });
  refused("split_with_sizes of a sum",
          [&](auto placed) { placed(vector).sum().split_with_sizes({1}); });
  refused("renorm of a sum", [&](auto placed) { placed(vector).sum().renorm(2, 0, 1); });
  refused("embedding in a vector",
          [&](auto placed) { at::embedding(placed(vector), placed(at::zeros({3}, at::kLong))); });
  refused("group_norm of channels that do not divide",
          [&](auto placed) { at::group_norm(placed(at::ones({2, 4, 6})), 3); });
  refused("rot90 in one plane", [&](auto placed) { placed(matrix).rot90(1, {0, 0}); });
  refused("rot90 in dims that are not there",
          [&](auto placed) { placed(matrix).rot90(1, {0, 5}); });
  refused("select_scatter far below zero",
          [&](auto placed) { at::select_scatter(placed(matrix), placed(at::ones({6})), 1, -9); });
}

TEST(Refusals, OfWindows) {
  const at::Tensor x = at::ones({1, 2, 8, 8}), w = at::ones({2, 2, 3, 3});
  const auto convolved = [&](const char* what, std::vector<std::int64_t> stride,
                             std::vector<std::int64_t> padding, std::vector<std::int64_t> dilation,
                             std::int64_t groups) {
    refused(what, [&](auto placed) {
      at::convolution(placed(x), placed(w), {}, stride, padding, dilation, false, {0, 0}, groups);
    });
  };
  convolved("stride 0", {0, 0}, {1, 1}, {1, 1}, 1);
  convolved("dilation 0", {1, 1}, {1, 1}, {0, 0}, 1);
  convolved("negative padding", {1, 1}, {-1, -1}, {1, 1}, 1);
  convolved("no groups", {1, 1}, {1, 1}, {1, 1}, 0);
  convolved("groups that do not divide", {1, 1}, {1, 1}, {1, 1}, 3);
  convolved("three strides", {1, 1, 1}, {1, 1}, {1, 1}, 1);
  convolved("no padding", {1, 1}, {}, {1, 1}, 1);
  refused("max_pool2d without kernel", [&](auto placed) { at::max_pool2d(placed(x), {}); });
  refused("avg_pool2d without padding",
          [&](auto placed) { at::avg_pool2d(placed(x), {2, 2}, {}, at::IntArrayRef{}); });
  refused("max_pool2d of three strides",
          [&](auto placed) { at::max_pool2d(placed(x), {2, 2}, {1, 1, 1}); });
}

TEST(Refusals, OfTypes) {
  const at::Tensor whole_numbers = at::ones({6, 4}, at::kLong), scores = at::zeros({6, 4});
  refused("softmax of whole numbers",
          [&](auto placed) { at::_softmax(placed(whole_numbers), 1, false); });
  refused("var of whole numbers", [&](auto placed) { placed(whole_numbers).var(); });
  refused("nansum of complex numbers",
          [&](auto placed) { placed(at::ones({4}, at::kComplexDouble)).nansum(); });
  refused("nll_loss of int32 targets",
          [&](auto placed) { at::nll_loss(placed(scores), placed(at::zeros({6}, at::kInt))); });
  refused("nll_loss with weights of doubles", [&](auto placed) {
    at::nll_loss(placed(scores), placed(at::zeros({6}, at::kLong)),
                 placed(at::ones({4}, at::kDouble)));
  });
  refused("trace of booleans", [&](auto placed) { placed(at::ones({4, 4}, at::kBool)).trace(); });
  refused("reflection_pad1d of booleans", [&](auto placed) {
    at::reflection_pad1d(placed(at::ones({1, 2, 6}, at::kBool)), {1, 1});
  });
}

TEST(Refusals, OfDraws) {
  const at::Tensor x = at::zeros({8}), whole_numbers = at::zeros({8}, at::kLong);
  refused("uniform_ of an empty range", [&](auto placed) { placed(x).uniform_(1, 0); });
  refused("normal_ of a negative deviation", [&](auto placed) { placed(x).normal_(0, -1); });
  refused("exponential_ of rate 0", [&](auto placed) { placed(x).exponential_(0); });
  refused("geometric_ of probability 0", [&](auto placed) { placed(x).geometric_(0); });
  refused("random_ of an empty range", [&](auto placed) { placed(x).random_(5, 5); });
  refused("bernoulli_ of 2", [&](auto placed) { placed(x).bernoulli_(2.0); });
  refused("uniform_ of whole numbers", [&](auto placed) { placed(whole_numbers).uniform_(); });
  refused("normal_ of whole numbers", [&](auto placed) { placed(whole_numbers).normal_(); });
  refused("rand_like of whole numbers", [&](auto placed) { at::rand_like(placed(whole_numbers)); });
  refused("bernoulli of whole numbers", [&](auto placed) { at::bernoulli(placed(whole_numbers)); });
}

TEST(Refusals, OfIndicesAndTheirSources) {
  const at::Tensor x = at::zeros({6, 4}), two = at::arange(2, at::kLong);
  refused("index_add of fewer indices than rows",
          [&](auto placed) { placed(x).index_add(1, placed(two), placed(at::ones({6, 3}))); });
  refused("index_copy of fewer indices than rows",
          [&](auto placed) { placed(x).index_copy(1, placed(two), placed(at::ones({6, 3}))); });
}

// Values are looked at by the ranks themselves: all of them refuse.
TEST(Refusals, OfIndicesFromTheEnd) {
  const at::Tensor x = at::zeros({6, 4}), negative = at::tensor({-1, 0}, at::kLong);
  EXPECT_ANY_THROW(x.index_select(1, negative));
  EXPECT_ANY_THROW(x.index_copy(1, negative, at::ones({6, 2})));
  for (const bool copies : {false, true}) {
    on_threads(2, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", 2}});
      set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
      const at::Tensor sharded = distribute_tensor(x, mesh, {Shard(1)});
      if (copies) {
        EXPECT_ANY_THROW(sharded.index_copy(1, negative, at::ones({6, 2})));
      } else {
        EXPECT_ANY_THROW(sharded.index_select(1, negative));
      }
    });
  }
}

TEST(Refusals, OfSparseGradients) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor table = leaf(randn({6, 3}, at::kDouble), ShardSpec(mesh, {6, 3}, {Shard(0)}));
    const at::Tensor rows = at::embedding(table, at::tensor({1, 2}, at::kLong), -1, false, true);
    rows.sum().backward();
    try {
      table.grad().exp();
      ADD_FAILURE() << "a function of a sparse gradient";
    } catch (const ShardingError& e) {
      EXPECT_NE(std::string(e.what()).find("to_dense"), std::string::npos) << e.what();
    }
    EXPECT_EQ(difference(table * 2, whole(table) * 2), 0) << "the groups do not go on";
  });
}

TEST(Refusals, OfFieldsShardedInSpace) {
  for (const auto type : {at::kInt, at::kLong, at::kBool, at::kComplexDouble}) {
    refused("nearest", [&](auto placed) {
      at::upsample_nearest2d(placed(at::ones({1, 1, 4, 4}, type)), {8, 8});
    });
    refused("nearest by an odd ratio", [&](auto placed) {
      at::upsample_nearest2d(placed(at::ones({1, 1, 22, 3}, type)), {25, 3});
    });
  }
  refused("grid_sampler of floats by doubles", [&](auto placed) {
    at::grid_sampler(placed(at::ones({1, 1, 8, 8})), placed(at::zeros({1, 4, 4, 2}, at::kDouble)),
                     0, 0, false);
  });
}

}  // namespace tessera::test::refusals_test
