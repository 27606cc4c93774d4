// Wrong arguments are errors: what plain libtorch refuses is refused by every rank, the process
// lives, and the next collective works.

#include "support.h"

namespace tessera::test::arguments_test {
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

// Windows whose lists have another length than there are dims, or numbers that no window has.
TEST(Refused, OfConvolutions) {
  using L = std::vector<std::int64_t>;
  struct Window {
    const char* what;
    L stride, padding, dilation, output_padding;
    int groups = 1;
  };
  const std::vector<Window> all = {
      {"no stride", {}, {0}, {1}, {0}},
      {"no padding", {1}, {}, {1}, {0}},
      {"no dilation", {1}, {0}, {}, {0}},
      {"no output_padding", {1}, {0}, {1}, {}},
      {"stride 0", {0}, {0}, {1}, {0}},
      {"stride -1", {-1}, {0}, {1}, {0}},
      {"padding -1", {1}, {-1}, {1}, {0}},
      {"dilation 0", {1}, {0}, {0}, {0}},
      {"dilation too large", {1}, {0}, {1000}, {0}},
      {"output_padding as large as the stride", {2}, {0}, {1}, {2}},
      {"output_padding as large as stride and dilation", {1}, {0}, {1}, {1}},
      {"output_padding -1", {2}, {0}, {1}, {-1}},
      {"padding of more than there is", {1}, {5}, {1}, {0}},
      {"no groups", {1}, {0}, {1}, {0}, 0},
      {"-1 groups", {1}, {0}, {1}, {0}, -1},
      {"groups that do not divide", {1}, {0}, {1}, {0}, 3},
      {"groups of which the weight knows nothing", {1}, {0}, {1}, {0}, 2},
      {"three strides", {1, 1, 1}, {0}, {1}, {0}},
      {"three output_paddings", {1}, {0}, {1}, {0, 0, 0}},
  };
  const auto check = [](const std::string& what, const Call& call) {
    expect_refused_alike(what.c_str(), call);
  };
  const at::Tensor x = ones({2, 2, 6}), w = ones({2, 2, 3});
  const auto plane = [](const at::Tensor& t) {
    return t.unsqueeze(-1).repeat({1, 1, 1, t.size(2)});
  };
  for (const Window& c : all) {
    const bool of_output =
        std::string_view(c.what).starts_with("output_padding") || c.output_padding.size() != 1;
    const bool transposed_alone = of_output || c.padding == L{5};
    const bool plain_alone = c.dilation == L{1000};
    for (const int dim : {-1, 0, 1, 2}) {
      if (!transposed_alone) {
        check(concat("conv1d: ", c.what, " ", dim), [&](const Put& put) {
          at::conv1d(put(x, dim), w, {}, c.stride, c.padding, c.dilation, c.groups);
        });
        check(concat("conv2d: ", c.what, " ", dim), [&](const Put& put) {
          at::conv2d(put(plane(x), dim), plane(w), {}, c.stride, c.padding, c.dilation, c.groups);
        });
      }
      if (plain_alone || c.groups == 2) continue;
      check(concat("conv_transpose1d: ", c.what, " ", dim), [&](const Put& put) {
        at::conv_transpose1d(put(x, dim), w, {}, c.stride, c.padding, c.output_padding, c.groups,
                             c.dilation);
      });
      check(concat("conv_transpose2d: ", c.what, " ", dim), [&](const Put& put) {
        at::conv_transpose2d(put(plane(x), dim), plane(w), {}, c.stride, c.padding,
                             c.output_padding, c.groups, c.dilation);
      });
    }
  }
}

TEST(Refused, OfPooling) {
  using L = std::vector<std::int64_t>;
  struct Window {
    const char* what;
    L kernel, stride, padding, dilation;
  };
  const std::vector<Window> all = {
      {"no kernel", {}, {2}, {0}, {1}},
      {"no padding", {2}, {2}, {}, {1}},
      {"no dilation", {2}, {2}, {0}, {}},
      {"kernel 0", {0}, {2}, {0}, {1}},
      {"stride 0", {2}, {0}, {0}, {1}},
      {"stride -1", {2}, {-1}, {0}, {1}},
      {"dilation 0", {2}, {2}, {0}, {0}},
      {"padding -1", {2}, {2}, {-1}, {1}},
      {"padding of more than half the kernel", {2}, {2}, {2}, {1}},
      {"a kernel that does not fit", {9}, {2}, {0}, {1}},
      {"four of everything", {2, 2, 2, 2}, {2, 2, 2, 2}, {0, 0, 0, 0}, {1, 1, 1, 1}},
  };
  const auto check = [](const std::string& what, const Call& call) {
    expect_refused_alike(what.c_str(), call);
  };
  const at::Tensor x = ones({2, 2, 6}), image = ones({2, 2, 6, 6}), volume = ones({2, 2, 6, 6, 6});
  for (const Window& c : all) {
    for (const int dim : {-1, 0, 1, 2}) {
      check(concat("max_pool1d: ", c.what, " ", dim), [&](const Put& put) {
        at::max_pool1d(put(x, dim), c.kernel, c.stride, c.padding, c.dilation);
      });
      check(concat("max_pool2d: ", c.what, " ", dim), [&](const Put& put) {
        at::max_pool2d(put(image, dim), c.kernel, c.stride, c.padding, c.dilation);
      });
      check(concat("max_pool3d: ", c.what, " ", dim), [&](const Put& put) {
        at::max_pool3d(put(volume, dim), c.kernel, c.stride, c.padding, c.dilation);
      });
      if (c.dilation != L{1} && c.dilation.size() != 4) continue;
      check(concat("avg_pool1d: ", c.what, " ", dim),
            [&](const Put& put) { at::avg_pool1d(put(x, dim), c.kernel, c.stride, c.padding); });
      check(concat("avg_pool2d: ", c.what, " ", dim), [&](const Put& put) {
        at::avg_pool2d(put(image, dim), c.kernel, c.stride, c.padding);
      });
      check(concat("avg_pool3d: ", c.what, " ", dim), [&](const Put& put) {
        at::avg_pool3d(put(volume, dim), c.kernel, c.stride, c.padding);
      });
    }
  }
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
    std::vector<at::Tensor> columns{put(at::empty({4}, at::kDouble))};
    EXPECT_THROW(at::unbind_copy_out(columns, put(a), 1), InvalidArgument) << "two into one";
    columns.push_back(columns[0].clone());
    at::unbind_copy_out(columns, put(a), 1);
    EXPECT_TRUE(whole(columns[1]).equal(a.select(1, 1)));
  });
}

// What is written to is a row or a column of another tensor, which had to be copied where its dim
// is sharded.
TEST(Taken, OutThatIsAView) {
  using Into = std::function<void(at::Tensor, const at::Tensor&)>;
  const std::vector<std::pair<const char*, Into>> calls = {
      {"add", [](at::Tensor out, const at::Tensor& a) { at::add_out(out, a, ones({4})); }},
      {"mul", [](at::Tensor out, const at::Tensor& a) { at::mul_out(out, a, a); }},
      {"exp", [](at::Tensor out, const at::Tensor& a) { at::exp_out(out, a); }},
      {"cumsum", [](at::Tensor out, const at::Tensor& a) { at::cumsum_out(out, a, 0); }},
      {"flip", [](at::Tensor out, const at::Tensor& a) { at::flip_out(out, a, {0}); }},
      {"mv", [](at::Tensor out, const at::Tensor& a) { at::mv_out(out, ones({4, 4}), a); }},
      {"cat",
       [](at::Tensor out, const at::Tensor& a) {
         at::cat_out(out, {a.narrow(0, 0, 1), a.narrow(0, 1, 3)});
       }},
      {"sum", [](at::Tensor out, const at::Tensor& a) { at::sum_out(out, a * ones({3, 4}), {0}); }},
  };
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> views = {
      {"a column", [](const at::Tensor& x) { return x.select(1, 1); }},
      {"a row", [](const at::Tensor& x) { return x.select(0, 2); }},
      {"columns", [](const at::Tensor& x) { return x.narrow(1, 1, 1).squeeze(1); }},
      {"the diagonal", [](const at::Tensor& x) { return x.diagonal(); }},
      {"turned", [](const at::Tensor& x) { return x.t().select(0, 3); }},
  };
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor matrix = at::arange(16, at::kDouble).view({4, 4}), vector = ones({4}) * 2;
    for (const auto& [name, into] : calls) {
      for (const auto& [which, view] : views) {
        at::Tensor expected = matrix.clone();
        into(view(expected), vector);
        for (const Placement& x : {Replicate(), Shard(0), Shard(1)}) {
          for (const Placement& a : {Replicate(), Shard(0)}) {
            SCOPED_TRACE(concat(name, " into ", which, " ", x, " of ", a));
            const at::Tensor base = distribute_tensor(matrix.clone(), mesh, {x}).detach();
            const at::Tensor out = view(base);
            into(out, distribute_tensor(vector, mesh, {a}).detach());
            EXPECT_EQ(difference(base, expected), 0) << "the tensor";
            EXPECT_EQ(difference(out, view(expected)), 0) << "the view";
            EXPECT_EQ(difference(view(base), view(expected)), 0) << "another view";
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::test::arguments_test
