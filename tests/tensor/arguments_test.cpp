// Wrong arguments are errors: what plain libtorch refuses is refused by every rank, the process
// lives, and the next collective works.

#include <ATen/core/dispatch/Dispatcher.h>

#include "support.h"

namespace tessera::test {
namespace {

using Put = std::function<at::Tensor(const at::Tensor&, int dim)>;
using Call = std::function<void(const Put&)>;

at::Tensor ones(at::IntArrayRef shape, at::ScalarType type = at::kDouble) {
  return at::ones(shape, type);
}

// For plain libtorch's tensors, and for ones whose dims are sharded over two ranks.
void expect_refused_alike(const char* what, const Call& call) {
  SCOPED_TRACE(what);
  const Put plain = [](const at::Tensor& t, int) { return t.clone(); };
  EXPECT_ANY_THROW(call(plain)) << "plain libtorch takes it";
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const Put put = [&](const at::Tensor& t, int dim) {
      return distribute_tensor(t.clone(), mesh, {dim < 0 ? Replicate() : Shard(dim)}).detach();
    };
    const auto works = [&] {
      EXPECT_DOUBLE_EQ(put(ones({4}), 0).sum().item<double>(), 4) << "the groups do not go on";
    };
    EXPECT_ANY_THROW(call(put));
    works();
    EXPECT_ANY_THROW(call(put)) << "the second time";
    works();
  });
}

TEST(Refused, AsPlainLibtorchRefuses) {
  const auto check = expect_refused_alike;
  check("cat of numbers",
        [](const Put& put) { at::cat({put(ones({4}), 0).sum(), put(ones({4}), 0).mean()}); });
  check("cat of a number and a vector",
        [](const Put& put) { at::cat({put(ones({4}), 0).sum(), put(ones({4}), 0).view({2, 2})}); });
  check("mm of a vector", [](const Put& put) { at::mm(ones({6}), put(ones({6, 4}), 0)); });
  check("bmm of matrices", [](const Put& put) { at::bmm(ones({4, 6}), put(ones({6, 4}), 1)); });
  check("mv of vectors", [](const Put& put) { at::mv(ones({6}), put(ones({6}), 0)); });
  check("repeat too few", [](const Put& put) { put(ones({4, 2}), 0).repeat({2}); });
  check("repeat none", [](const Put& put) { put(ones({4, 2}), 0).repeat({}); });
  check("layer_norm of a vector",
        [](const Put& put) { at::layer_norm(put(ones({6}), 0), {3, 6}); });
  check("layer_norm of a number",
        [](const Put& put) { at::layer_norm(put(ones({6}), 0).sum(), {6}); });
  const auto conv = [](const Put& put, at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation, int groups) {
    at::conv2d(put(ones({2, 2, 6, 6}), 2), ones({2, 2, 3, 3}), {}, stride, padding, dilation,
               groups);
  };
  check("stride 0", [&](const Put& put) { conv(put, {0, 0}, {0, 0}, {1, 1}, 1); });
  check("groups 0", [&](const Put& put) { conv(put, {1, 1}, {0, 0}, {1, 1}, 0); });
  check("negative padding", [&](const Put& put) { conv(put, {1, 1}, {-1, 0}, {1, 1}, 1); });
  check("three strides", [&](const Put& put) { conv(put, {1, 1, 1}, {0, 0}, {1, 1}, 1); });
  check("pooling of no size",
        [](const Put& put) { at::max_pool2d(put(ones({2, 2, 6, 6}), 2), {}); });
  check("pooling of three paddings", [](const Put& put) {
    at::avg_pool2d(put(ones({2, 2, 6, 6}), 2), {2, 2}, {2, 2}, {0, 0, 0});
  });
  check("split of a number", [](const Put& put) { put(ones({4}), 0).sum().split(1); });
  check("split_with_sizes of a number",
        [](const Put& put) { put(ones({4}), 0).sum().split_with_sizes({1}); });
  check("slice of a number", [](const Put& put) { at::slice(put(ones({4}), 0).sum(), 0, 0, 1); });
  check("renorm of a number", [](const Put& put) { put(ones({4}), 0).sum().renorm(2, 0, 1.0); });
  check("embedding of numbers", [](const Put& put) {
    at::embedding(put(ones({4}), 0).sum(), put(at::zeros({4}, at::kLong), 0));
  });
  check("dim too far", [](const Put& put) { put(ones({4, 2}), 0).sum(5); });
  check("transpose too far", [](const Put& put) { put(ones({4, 2}), 0).transpose(0, 3); });
  check("a view of another size", [](const Put& put) { put(ones({4, 2}), 0).view({3, 3}); });
  check("select too far", [](const Put& put) { put(ones({4, 2}), 1).select(0, 4); });
}

TEST(Refused, WhereTheTargetDoesNotFit) {
  const auto check = expect_refused_alike;
  const std::vector<std::pair<const char*, std::function<void(at::Tensor, at::Tensor)>>> writes = {
      {"add_", [](at::Tensor t, at::Tensor o) { t.add_(o); }},
      {"mul_", [](at::Tensor t, at::Tensor o) { t.mul_(o); }},
      {"copy_", [](at::Tensor t, at::Tensor o) { t.copy_(o); }},
      {"lerp_", [](at::Tensor t, at::Tensor o) { t.lerp_(o, 0.5); }},
      {"addcmul_", [](at::Tensor t, at::Tensor o) { t.addcmul_(o, o); }},
      {"clamp_", [](at::Tensor t, at::Tensor o) { t.clamp_min_(o); }},
      {"gt_", [](at::Tensor t, at::Tensor o) { t.gt_(o); }},
      {"masked_fill_", [](at::Tensor t, at::Tensor o) { t.masked_fill_(o.to(at::kBool), 2); }},
  };
  for (const auto& [name, write] : writes) {
    // half of it: what one rank has of the target
    check(name, [&](const Put& put) { write(put(ones({4}), 0), ones({2})); });
    check(name, [&](const Put& put) { write(put(ones({4, 2}), 0), put(ones({2, 2}), 0)); });
  }
  check("a float into an integer",
        [](const Put& put) { put(ones({4}, at::kInt), 0).add_(ones({4})); });
  check("a quotient into an integer", [](const Put& put) { put(ones({4}, at::kInt), 0).div_(2); });
  check("out of integers", [](const Put& put) {
    at::Tensor out = put(ones({4}, at::kLong), 0);
    at::add_out(out, put(ones({4}), 0), put(ones({4}), 0));
  });
  check("out of single precision", [](const Put& put) {
    at::Tensor out = put(ones({4, 4}, at::kFloat), 0);
    at::mm_out(out, put(ones({4, 4}), 0), put(ones({4, 4}), 0));
  });
}

// A rank that writes no slice looks at none: all ranks must see it in the shapes.
TEST(Refused, OnEveryRankWhereSlicesDoNotFit) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const auto& shape :
         std::vector<std::vector<std::int64_t>>{{2}, {2, 5}, {2, 1}, {2, 6, 1}, {1, 6}, {}}) {
      for (const int dim : {0, 1}) {
        const at::Tensor x = distribute_tensor(ones({4, 6}), mesh, {Shard(dim)});
        const at::Tensor source = ones(shape), first = at::arange(2);
        const std::vector<std::function<void()>> calls = {
            [&] { x.index_add_(0, first, source); },
            [&] { x.index_add(0, first, source); },
            [&] { x.index_copy_(0, first, source); },
            [&] { x.index_copy(0, first, source); },
            [&] { x.index_reduce_(0, first, source, "prod"); },
            [&] { x.index_reduce(0, first, source, "amax"); }};
        for (std::size_t i = 0; i < calls.size(); ++i) {
          try {
            calls[i]();
            ADD_FAILURE() << "call " << i << " takes a source of shape " << at::IntArrayRef(shape);
          } catch (const PeerFailedError& e) {
            ADD_FAILURE() << "call " << i << " is refused on the other rank alone: " << e.what();
          } catch (const std::exception&) {
          }
        }
        EXPECT_DOUBLE_EQ(x.sum().item<double>(), 24);
      }
    }
  });
}

TEST(Refused, WhereWhatIsReadIsWritten) {
  const auto check = expect_refused_alike;
  for (const int dim : {0, 1}) {
    check("add_ of the rows before", [&](const Put& put) {
      const at::Tensor x = put(ones({4, 3}), dim);
      x.narrow(0, 1, 3).add_(x.narrow(0, 0, 3));
    });
    check("copy_ of the rows before", [&](const Put& put) {
      const at::Tensor x = put(ones({4, 3}), dim);
      x.narrow(0, 1, 3).copy_(x.narrow(0, 0, 3));
    });
    check("mul_ of the transposed", [&](const Put& put) {
      const at::Tensor x = put(ones({4, 4}), dim);
      x.mul_(x.t());
    });
  }
}

TEST(Refused, WhereDtypesDoNotFit) {
  const auto check = expect_refused_alike;
  const auto f = at::kFloat;
  check("mm", [&](const Put& put) { put(ones({4, 6}), 0).matmul(ones({6, 2}, f)); });
  check("addmm",
        [&](const Put& put) { at::addmm(ones({2}, f), put(ones({4, 6}), 0), ones({6, 2})); });
  check("linear", [&](const Put& put) { at::linear(put(ones({4, 6}), 0), ones({2, 6}, f)); });
  check("conv",
        [&](const Put& put) { at::conv2d(put(ones({2, 2, 6, 6}), 0), ones({2, 2, 3, 3}, f)); });
  check("softmax of integers", [&](const Put& put) { put(ones({4, 6}, at::kInt), 0).softmax(1); });
  check("gelu of integers", [&](const Put& put) { at::gelu(put(ones({4, 6}, at::kInt), 0)); });
  check("nll_loss of integers over sharded classes", [&](const Put& put) {
    at::nll_loss(put(ones({4, 6}, at::kLong), 1), at::zeros({4}, at::kLong));
  });
  check("bitwise", [&](const Put& put) { put(ones({4, 6}), 0).bitwise_and(put(ones({4, 6}), 0)); });
  check("sort of complex",
        [&](const Put& put) { put(ones({4, 6}, at::kComplexDouble), 0).sort(1); });
  check("max of complex", [&](const Put& put) {
    at::maximum(put(ones({4}, at::kComplexDouble), 0), put(ones({4}, at::kComplexDouble), 0));
  });
}

// Of integers the number decides; one rank has none, and the same call was made with another.
TEST(Refused, WhereTheNumberDoesNotFit) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor x = distribute_tensor(at::arange(1, 5), mesh, {Shard(0)}, {{0, {3, 0, 1}}});
    const auto next = [&] { EXPECT_EQ(x.sum().item<std::int64_t>(), 10); };
    for (int again = 0; again < 2; ++again) {
      EXPECT_EQ(x.pow(2).sum().item<std::int64_t>(), 30);
      EXPECT_THROW(x.pow(-1), c10::Error);
      next();
      EXPECT_EQ(at::floor_divide(x, 2).sum().item<std::int64_t>(), 4);
      EXPECT_THROW(at::floor_divide(x, 0), c10::Error);
      next();
      EXPECT_EQ(at::remainder(x, 2).sum().item<std::int64_t>(), 2);
      EXPECT_THROW(at::remainder(x, 0), c10::Error);
      EXPECT_THROW(at::fmod(x, 0), c10::Error);
      EXPECT_THROW(x.clone().div_(0, "floor"), c10::Error);
      next();
    }
  });
}

// Its kernels read as far as the lengths say, whatever the tensors have.
TEST(Taken, LengthsOfSequences) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = randn({50, 4, 20}, at::kDouble).log_softmax(2);
    const at::Tensor targets = randint(19, {4, 30}) + 1;
    const std::vector<std::int64_t> inputs(4, 50), lengths{22, 30, 10, 13};
    const auto gradient = [&](const at::Tensor& x) {
      at::ctc_loss(x, targets, inputs, lengths).backward();
      return x.grad();
    };
    const at::Tensor expected = gradient(value.clone().requires_grad_(true));
    for (const int dim : {0, 1, 2})
      EXPECT_LT(
          difference(gradient(leaf(value, ShardSpec(mesh, {50, 4, 20}, {Shard(dim)}))), expected),
          1e-12)
          << dim;
  });
}

TEST(Taken, AsPlainLibtorchTakes) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const auto put = [&](const at::Tensor& t) {
      return distribute_tensor(t.clone(), mesh, {Shard(0)}).detach();
    };
    const at::Tensor a = at::arange(1, 9, at::kDouble).view({4, 2}), b = a.flip(0).contiguous();
    const auto out =
        [&](const std::function<void(at::Tensor&, const at::Tensor&, const at::Tensor&)>& call) {
          at::Tensor plain = at::empty({4, 2}, at::kDouble), sharded = put(plain);
          call(plain, a, b);
          call(sharded, put(a), put(b));
          EXPECT_TRUE(whole(sharded).equal(plain));
        };
    out([](at::Tensor& o, const at::Tensor& x, const at::Tensor& y) {
      at::div_out(o, x, y, "floor");
    });
    out([](at::Tensor& o, const at::Tensor& x, const at::Tensor&) { at::xlogy_out(o, 2.0, x); });
    out([](at::Tensor& o, const at::Tensor& x, const at::Tensor&) { at::xlogy_out(o, x, 2.0); });
    // What is written does not overlap what is read, or is the same.
    const auto writes = [](const at::Tensor& x) {
      x.narrow(0, 0, 2).add_(x.narrow(0, 2, 2));
      x.narrow(0, 3, 1).copy_(x.narrow(0, 0, 1));
      x.narrow(0, 1, 2).mul_(x.narrow(0, 1, 2));
      return x;
    };
    EXPECT_TRUE(whole(writes(put(a))).equal(writes(a.clone())));
    // sort(stable, out=)
    at::Tensor values = at::empty({4, 2}, at::kDouble), order = at::empty({4, 2}, at::kLong),
               cut_values = put(values), cut_order = put(order);
    at::sort_out(values, order, b, true, 1, true);
    at::sort_out(cut_values, cut_order, put(b), true, 1, true);
    EXPECT_TRUE(whole(cut_values).equal(values) && whole(cut_order).equal(order));
    EXPECT_DOUBLE_EQ(cut_values.sum().item<double>(), values.sum().item<double>());
  });
}

// One argument after the other is made wrong, or at least different.
std::vector<c10::IValue> perturbed(Draw& draw, const c10::IValue& v) {
  if (v.isTensor()) {
    const at::Tensor t = v.toTensor();
    std::vector<c10::IValue> all = {
        t.sum(),         t.unsqueeze(0),
        t.reshape({-1}), t.to(t.is_floating_point() ? at::kLong : at::kDouble),
        t.to(at::kBool), t.to(at::kFloat)};
    if (t.dim() > 0) {
      const int d = draw.below(static_cast<int>(t.dim()));
      all.emplace_back(t.narrow(d, 0, t.size(d) / 2).contiguous());
      all.emplace_back(t.narrow(d, 0, 0).contiguous());
      all.emplace_back(at::cat({t, t}, d));
    }
    return all;
  }
  if (v.isInt()) return {-100, -1, 0, 1, 3, 100};
  if (v.isIntList()) {
    std::vector<std::int64_t> list = v.toIntVector(), longer = list, zero = list, minus = list;
    longer.push_back(1);
    for (auto& n : zero) n = 0;
    for (auto& n : minus) n = -n - 1;
    std::vector<std::int64_t> shorter(list.begin(), list.end() - (list.empty() ? 0 : 1));
    return {std::vector<std::int64_t>{}, longer, zero, minus, shorter};
  }
  return {};
}

struct Base {
  const char* name;
  const char* overload;
  std::vector<c10::IValue> arguments;
};

// None that looks values up: an index out of range is seen by the rank that has it, and ends the
// groups.
std::vector<Base> bases() {
  const at::Tensor m = at::arange(1, 25, at::kDouble).view({4, 6}),
                   v = at::arange(1, 7, at::kDouble),
                   square = at::arange(1, 17, at::kDouble).view({4, 4}),
                   image = at::arange(1, 145, at::kDouble).view({2, 2, 6, 6});
  using L = std::vector<std::int64_t>;
  const c10::IValue none;
  return {
      {"aten::add", "Tensor", {m, m, 1}},
      {"aten::mul", "Tensor", {m, v}},
      {"aten::div", "Tensor", {m, v}},
      {"aten::add_", "Tensor", {m, v, 1}},
      {"aten::mul_", "Tensor", {m, m}},
      {"aten::copy_", "", {m, m, false}},
      {"aten::maximum", "", {m, m}},
      {"aten::atan2", "", {m, m}},
      {"aten::where", "self", {m.gt(3), m, m}},
      {"aten::mm", "", {m, m.t().contiguous()}},
      {"aten::bmm", "", {image[0], image[1]}},
      {"aten::addmm", "", {v.narrow(0, 0, 4).contiguous(), m, m.t().contiguous(), 1, 1}},
      {"aten::sum", "dim_IntList", {m, L{0}, false, none}},
      {"aten::mean", "dim", {m, L{0}, false, none}},
      {"aten::amax", "", {m, L{0}, false}},
      {"aten::cumsum", "", {m, 1, none}},
      {"aten::_softmax", "", {m, 1, false}},
      {"aten::_log_softmax", "", {m, 1, false}},
      {"aten::transpose", "int", {m, 0, 1}},
      {"aten::permute", "", {image, L{0, 2, 3, 1}}},
      {"aten::view", "", {m, L{2, 2, 6}}},
      {"aten::expand", "", {m, L{2, 4, 6}, false}},
      {"aten::repeat", "", {m, L{1, 2}}},
      {"aten::unsqueeze", "", {m, 1}},
      {"aten::squeeze", "dim", {m, 1}},
      {"aten::slice", "Tensor", {m, 1, 1, 3, 1}},
      {"aten::select", "int", {m, 1, 2}},
      {"aten::flip", "", {m, L{1}}},
      {"aten::native_layer_norm", "", {m, L{6}, v, v, 1e-5}},
      {"aten::convolution",
       "",
       {image, image.narrow(2, 0, 3).narrow(3, 0, 3).contiguous(), none, L{1, 1}, L{1, 1}, L{1, 1},
        false, L{0, 0}, 1}},
      {"aten::relu", "", {m}},
      {"aten::tril", "", {square, 0}},
      {"aten::constant_pad_nd", "", {m, L{0, 1}, 0}},
  };
}

std::string describe(const Base& base, const std::vector<c10::IValue>& arguments) {
  std::string text = concat(base.name, ".", base.overload, "(");
  for (const auto& v : arguments) {
    if (v.isTensor()) {
      text += concat(v.toTensor().toString(), list(v.toTensor().sizes().vec()), ", ");
    } else {
      text += concat(v, ", ");
    }
  }
  return text + ")";
}

TEST(Refused, OfPerturbedArguments) {
  std::atomic<int> refused = 0, taken = 0;
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Draw draw(7);
    for (const Base& base : bases()) {
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(base.name, base.overload);
      for (std::size_t a = 0; a < base.arguments.size(); ++a) {
        for (const c10::IValue& other : perturbed(draw, base.arguments[a])) {
          auto arguments = base.arguments;
          arguments[a] = other;
          SCOPED_TRACE(describe(base, arguments));
          torch::jit::Stack plain, sharded;
          for (const auto& v : arguments) {
            if (!v.isTensor()) {
              plain.push_back(v);
              sharded.push_back(v);
              continue;
            }
            const at::Tensor t = v.toTensor();
            plain.emplace_back(t.clone());
            const int dim = t.dim() == 0 ? -1 : draw.below(static_cast<int>(t.dim()) + 1) - 1;
            sharded.emplace_back(
                distribute_tensor(t.clone(), mesh, {dim < 0 ? Replicate() : Shard(dim)}).detach());
          }
          bool plain_throws = false, throws = false, ours = false;
          std::string what;
          try {
            op.callBoxed(&plain);
          } catch (const std::exception& e) {
            plain_throws = true;
          }
          try {
            op.callBoxed(&sharded);
          } catch (const Error& e) {
            throws = ours = true;
            what = e.what();
          } catch (const c10::Error& e) {
            throws = true;
            what = e.what_without_backtrace();
          }
          (throws ? refused : taken)++;
          EXPECT_TRUE(throws || !plain_throws) << "is taken";
          EXPECT_TRUE(plain_throws || !throws || ours) << what;
          // whatever it was, the groups go on
          ASSERT_DOUBLE_EQ(distribute_tensor(ones({3}), mesh, {Shard(0)}).sum().item<double>(), 3);
        }
      }
    }
  });
  EXPECT_GT(refused, 300);
  EXPECT_GT(taken, 300);
}

}  // namespace
}  // namespace tessera::test
