#include "cases.h"

namespace tessera::test {

namespace {

using Shape = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;
namespace F = torch::nn::functional;

Shape shape(Draw& d, int low = 0, int high = 3, int smallest = 0) {
  Shape s;
  for (int n = d.between(low, high); n > 0; --n) s.push_back(d.between(smallest, 6));
  return s;
}
at::Tensor random(const Shape& s) { return randn(s, at::kDouble); }
at::Tensor positive(const Shape& s) { return rand(s, at::kDouble) + 0.5; }
int dim_of(Draw& d, const at::Tensor& t) { return d.below(std::max<int>(static_cast<int>(t.dim()), 1)); }
std::vector<std::int64_t> some_dims(Draw& d, const at::Tensor& t) {
  std::vector<std::int64_t> dims;
  for (int i = 0; i < t.dim(); ++i) {
    if (d.chance(50)) dims.push_back(i);
  }
  if (dims.empty() && t.dim() > 0) dims.push_back(0);
  return dims;
}
// A shape that broadcasts to `s`.
Shape narrower(Draw& d, const Shape& s) {
  Shape t(s.begin() + d.below(static_cast<int>(s.size()) + 1), s.end());
  for (auto& n : t) n = d.chance(30) ? 1 : n;
  return t;
}

std::vector<OperatorCase> all;

void unary(const char* name, std::function<at::Tensor(const at::Tensor&)> f, bool positive_only = false, int least_dims = 0, int smallest = 0) {
  all.push_back({name, [=](Draw& d) {
                   const Shape s = shape(d, least_dims, 3, smallest);
                   return Instance{{positive_only ? positive(s) : random(s)}, [=](const Tensors& t) { return Tensors{f(t[0])}; }};
                 }});
}
void binary(const char* name, std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> f, bool positive_only = false) {
  all.push_back({name, [=](Draw& d) {
                   const Shape s = shape(d), other = narrower(d, s);
                   const bool swapped = d.chance(30);
                   const at::Tensor a = positive_only ? positive(s) : random(s), b = positive_only ? positive(other) : random(other);
                   return Instance{{a, b}, [=](const Tensors& t) { return Tensors{swapped ? f(t[1], t[0]) : f(t[0], t[1])}; }};
                 }});
}
// `f` takes the input and a dim drawn for it.
void along(const char* name, std::function<at::Tensor(const at::Tensor&, std::int64_t)> f, int smallest = 1) {
  all.push_back({name, [=](Draw& d) {
                   const at::Tensor x = random(shape(d, 1, 3, smallest));
                   const int dim = dim_of(d, x) - (d.chance(50) ? static_cast<int>(x.dim()) : 0);
                   return Instance{{x}, [=](const Tensors& t) { return Tensors{f(t[0], dim)}; }};
                 }});
}
void reduction(const char* name, std::function<at::Tensor(const at::Tensor&, at::IntArrayRef, bool)> f, int smallest = 1,
               bool positive_only = false) {
  all.push_back({name, [=](Draw& d) {
                   const Shape s = shape(d, 1, 3, smallest);
                   const at::Tensor x = positive_only ? positive(s) : random(s);
                   const auto dims = some_dims(d, x);
                   const bool keep = d.chance(50);
                   return Instance{{x}, [=](const Tensors& t) { return Tensors{f(t[0], dims, keep)}; }};
                 }});
}
void custom(const char* name, std::function<Instance(Draw&)> make) { all.push_back({name, std::move(make)}); }

void add_pointwise() {
  unary("relu", [](const auto& x) { return x.relu(); });
  unary("gelu", [](const auto& x) { return F::gelu(x); });
  unary("tanh", [](const auto& x) { return x.tanh(); });
  unary("sigmoid", [](const auto& x) { return x.sigmoid(); });
  unary("silu", [](const auto& x) { return F::silu(x); });
  unary("exp", [](const auto& x) { return x.exp(); });
  unary("log", [](const auto& x) { return x.log(); }, true);
  unary("sqrt", [](const auto& x) { return x.sqrt(); }, true);
  unary("neg", [](const auto& x) { return -x; });
  unary("abs", [](const auto& x) { return x.abs(); });
  unary("add scalar", [](const auto& x) { return x + 1.5; });
  unary("mul scalar", [](const auto& x) { return x * 3; });
  unary("scalar minus", [](const auto& x) { return 2 - x; });
  unary("pow", [](const auto& x) { return x.pow(3); });
  unary("clamp", [](const auto& x) { return x.clamp(-0.5, 0.5); });
  unary("leaky_relu", [](const auto& x) { return F::leaky_relu(x); });
  unary("softplus", [](const auto& x) { return F::softplus(x); });
  unary("elu", [](const auto& x) { return F::elu(x); });
  unary("hardtanh", [](const auto& x) { return F::hardtanh(x); });
  unary("logsigmoid", [](const auto& x) { return F::logsigmoid(x); });
  unary("clone", [](const auto& x) { return x.clone(); });
  unary("to float and back", [](const auto& x) { return x.to(at::kFloat).to(at::kDouble); });
  unary("masked_fill", [](const auto& x) { return x.masked_fill(x > 0, 0.25); });
  unary("where", [](const auto& x) { return at::where(x > 0, x * 2, x.exp()); });
  unary("zeros_like", [](const auto& x) { return at::zeros_like(x) + x; });
  unary("ones_like", [](const auto& x) { return at::ones_like(x) * x; });
  unary("detach", [](const auto& x) { return x.detach() * x; });
  binary("add", [](const auto& a, const auto& b) { return a + b; });
  binary("sub with alpha", [](const auto& a, const auto& b) { return at::sub(a, b, 0.5); });
  binary("mul", [](const auto& a, const auto& b) { return a * b; });
  binary("div", [](const auto& a, const auto& b) { return a / b; }, true);
  binary("pow of two", [](const auto& a, const auto& b) { return a.pow(b); }, true);
  binary("maximum", [](const auto& a, const auto& b) { return at::maximum(a, b); });
  binary("atan2", [](const auto& a, const auto& b) { return at::atan2(a, b); }, true);
  binary("addcmul", [](const auto& a, const auto& b) { return at::addcmul(a, a, b, 0.3); });
  binary("lerp", [](const auto& a, const auto& b) { return at::lerp(a, b, 0.3); });
  binary("comparison", [](const auto& a, const auto& b) { return (a > b).to(at::kDouble) * a; });
  custom("in-place chain", [](Draw& d) {
    const at::Tensor x = random(shape(d));
    return Instance{{x}, [](const Tensors& t) {
                      at::Tensor y = t[0] * 1;
                      y.mul_(2).add_(t[0]).sub_(0.5);
                      y.exp_();
                      return Tensors{y};
                    }};
  });
}

void add_reductions() {
  unary("sum all", [](const auto& x) { return x.sum(); });
  unary("mean all", [](const auto& x) { return x.mean(); }, false, 0, 1);
  unary("var all", [](const auto& x) { return x.var(); }, false, 1, 2);
  unary("max all", [](const auto& x) { return x.max(); }, false, 0, 1);
  unary("norm all", [](const auto& x) { return x.norm(); }, false, 0, 1);
  unary("any", [](const auto& x) { return (x > 1).any().to(at::kDouble) * x; });
  unary("all", [](const auto& x) { return (x > -1).all().to(at::kDouble) * x; });
  reduction("sum", [](const auto& x, auto dims, bool keep) { return x.sum(dims, keep); }, 0);
  reduction("mean", [](const auto& x, auto dims, bool keep) { return x.mean(dims, keep); });
  reduction("var", [](const auto& x, auto dims, bool keep) { return x.var(dims, c10::Scalar(0), keep); });
  reduction("std", [](const auto& x, auto dims, bool keep) { return x.std(dims, c10::Scalar(0), keep); }, 2);
  reduction("amax", [](const auto& x, auto dims, bool keep) { return x.amax(dims, keep); });
  reduction("amin", [](const auto& x, auto dims, bool keep) { return x.amin(dims, keep); });
  reduction("vector norm 2", [](const auto& x, auto dims, bool keep) { return at::linalg_vector_norm(x, 2, dims, keep); });
  reduction("vector norm 1", [](const auto& x, auto dims, bool keep) { return at::linalg_vector_norm(x, 1, dims, keep); });
  reduction("vector norm 3", [](const auto& x, auto dims, bool keep) { return at::linalg_vector_norm(x, 3, dims, keep); });
  reduction("vector norm inf", [](const auto& x, auto dims, bool keep) { return at::linalg_vector_norm(x, INFINITY, dims, keep); });
  reduction("logsumexp", [](const auto& x, auto dims, bool keep) { return x.logsumexp(dims, keep); });
  along("prod", [](const auto& x, auto dim) { return (x.abs() + 0.5).prod(dim); });
  along("max.dim", [](const auto& x, auto dim) { return std::get<0>(x.max(dim)); });
  along("argmax", [](const auto& x, auto dim) { return x.argmax(dim).to(at::kDouble); });
  along("cumsum", [](const auto& x, auto dim) { return x.cumsum(dim); });
  along("cumprod", [](const auto& x, auto dim) { return (x.abs() + 0.5).cumprod(dim); });
  along("softmax", [](const auto& x, auto dim) { return x.softmax(dim); });
  along("log_softmax", [](const auto& x, auto dim) { return x.log_softmax(dim); });
  along("sort", [](const auto& x, auto dim) { return std::get<0>(x.sort(dim)); });
  along("topk", [](const auto& x, auto dim) { return std::get<0>(x.topk(1, dim)); });
  along("flip", [](const auto& x, auto dim) { return x.flip(dim); });
  along("roll", [](const auto& x, auto dim) { return x.roll(1, dim); });
}

void add_products() {
  custom("mm", [](Draw& d) {
    const int m = d.between(0, 6), k = d.between(1, 6), n = d.between(0, 6);
    return Instance{{random({m, k}), random({k, n})}, [](const Tensors& t) { return Tensors{t[0].mm(t[1])}; }};
  });
  custom("mm transposed", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6), n = d.between(1, 6);
    return Instance{{random({k, m}), random({n, k})}, [](const Tensors& t) { return Tensors{t[0].t().mm(t[1].t())}; }};
  });
  custom("bmm", [](Draw& d) {
    const int b = d.between(1, 4), m = d.between(1, 5), k = d.between(1, 5), n = d.between(1, 5);
    return Instance{{random({b, m, k}), random({b, k, n})}, [](const Tensors& t) { return Tensors{t[0].bmm(t[1])}; }};
  });
  custom("baddbmm", [](Draw& d) {
    const int b = d.between(1, 4), m = d.between(1, 5), k = d.between(1, 5), n = d.between(1, 5);
    return Instance{{random({1, m, n}), random({b, m, k}), random({b, k, n})},
                    [](const Tensors& t) { return Tensors{at::baddbmm(t[0], t[1], t[2], 0.5, 2.0)}; }};
  });
  custom("addmm", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6), n = d.between(1, 6);
    return Instance{{random({n}), random({m, k}), random({k, n})}, [](const Tensors& t) { return Tensors{at::addmm(t[0], t[1], t[2], 0.5, 2.0)}; }};
  });
  custom("mv and dot", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6);
    return Instance{{random({m, k}), random({k})}, [](const Tensors& t) { return Tensors{t[0].mv(t[1]), t[1].dot(t[1])}; }};
  });
  custom("linear", [](Draw& d) {
    Shape s = shape(d, 1, 2, 1);
    const int k = d.between(1, 6), n = d.between(1, 6);
    s.push_back(k);
    const bool bias = d.chance(60);
    return Instance{{random(s), random({n, k}), random({n})},
                    [=](const Tensors& t) { return Tensors{bias ? F::linear(t[0], t[1], t[2]) : F::linear(t[0], t[1]) + t[2]}; }};
  });
  custom("matmul", [](Draw& d) {
    const int b = d.between(1, 3), h = d.between(1, 3), m = d.between(1, 4), k = d.between(1, 4), n = d.between(1, 4);
    const bool shared = d.chance(40);
    return Instance{{random({b, h, m, k}), shared ? random({k, n}) : random({b, h, k, n})},
                    [](const Tensors& t) { return Tensors{t[0].matmul(t[1])}; }};
  });
  custom("einsum", [](Draw& d) {
    const int b = d.between(1, 4), i = d.between(1, 4), j = d.between(1, 4), k = d.between(1, 4);
    return Instance{{random({b, i, k}), random({b, j, k})}, [](const Tensors& t) { return Tensors{at::einsum("bik,bjk->bij", {t[0], t[1]})}; }};
  });
}

void add_views() {
  unary("flatten", [](const auto& x) { return x.flatten() * 2; });
  unary("unsqueeze and squeeze", [](const auto& x) { return x.unsqueeze(0).exp().squeeze(); }, false, 1);
  unary("expand", [](const auto& x) { return x.unsqueeze(1).expand({x.size(0), 3, x.size(1)}) * 2; }, false, 2, 1);
  unary("repeat", [](const auto& x) { return x.repeat({2, 1, 1}); }, false, 2, 1);
  unary("broadcast sum", [](const auto& x) { return x.sum().expand(x.sizes()) * x; });
  along("slice", [](const auto& x, auto dim) { return x.slice(dim, 1, 5, 2) * 2; }, 0);
  along("narrow", [](const auto& x, auto dim) { return x.narrow(dim, x.size(dim) / 3, x.size(dim) / 2) * 2; });
  along("select", [](const auto& x, auto dim) { return x.select(dim, -1) * 2; });
  along("unbind", [](const auto& x, auto dim) { return x.unbind(dim).back() * 2; });
  along("chunk", [](const auto& x, auto dim) { return x.chunk(2, dim)[0] * 2; });
  along("split", [](const auto& x, auto dim) { return at::cat(x.split(2, dim), dim); });
  along("stack", [](const auto& x, auto dim) { return at::stack({x, x * 2}, dim); });
  along("unfold", [](const auto& x, auto dim) { return x.unfold(dim, 1, 2) * 2; });
  custom("cat", [](Draw& d) {
    Shape a = shape(d, 1, 3, 1), b = a;
    const int dim = d.below(static_cast<int>(a.size()));
    b[dim] = d.between(1, 4);
    return Instance{{random(a), random(b)}, [=](const Tensors& t) { return Tensors{at::cat({t[0], t[1], t[0]}, dim)}; }};
  });
  custom("permute and reshape", [](Draw& d) {
    const int a = d.between(1, 4), b = d.between(1, 4), c = d.between(1, 4);
    const int which = d.below(4);
    return Instance{{random({a, b, c})}, [=](const Tensors& t) -> Tensors {
                      switch (which) {
                        case 0:
                          return {t[0].permute({2, 0, 1}).reshape({c, a * b}) * 2};
                        case 1:
                          return {t[0].reshape({a * b, c}).view({a, b, c}) * 2};
                        case 2:
                          return {t[0].transpose(0, 1).contiguous().view({b, a * c}) * 2};
                        default:
                          return {t[0].reshape({a, 1, b * c}) * 2};
                      }
                    }};
  });
  custom("split heads", [](Draw& d) {
    const int b = d.between(1, 3), s = d.between(1, 4), h = d.between(1, 4);
    return Instance{{random({b, s, h * 2})}, [=](const Tensors& t) { return Tensors{t[0].view({b, s, h, 2}).transpose(1, 2).contiguous() * 2}; }};
  });
  custom("write to a view", [](Draw& d) {
    const at::Tensor x = random(shape(d, 1, 3, 1));
    const int dim = dim_of(d, x);
    return Instance{{x}, [=](const Tensors& t) {
                      at::Tensor y = t[0] * 1;
                      y.narrow(dim, 0, (y.size(dim) + 1) / 2).mul_(3);
                      return Tensors{y * t[0]};
                    }};
  });
  custom("diagonal", [](Draw& d) {
    return Instance{{random({d.between(1, 5), d.between(1, 5), d.between(1, 3)})}, [](const Tensors& t) { return Tensors{t[0].diagonal() * 2}; }};
  });
  custom("tril", [](Draw& d) {
    return Instance{{random({d.between(1, 3), d.between(1, 5), d.between(1, 5)})},
                    [](const Tensors& t) { return Tensors{t[0].tril(), t[0].triu(1)}; }};
  });
  custom("pad", [](Draw& d) {
    return Instance{{random({d.between(1, 3), d.between(1, 5), d.between(1, 5)})},
                    [](const Tensors& t) { return Tensors{at::constant_pad_nd(t[0], {1, 2}, 0.5)}; }};
  });
}

void add_layers() {
  custom("layer_norm", [](Draw& d) {
    const int a = d.between(0, 5), b = d.between(1, 4), c = d.between(2, 6);
    return Instance{{random({a, b, c}), random({c}), random({c})}, [=](const Tensors& t) { return Tensors{at::layer_norm(t[0], {c}, t[1], t[2])}; }};
  });
  custom("group_norm", [](Draw& d) {
    const int n = d.between(1, 5), s = d.between(2, 4);
    return Instance{{random({n, 4, s}), random({4}), random({4})}, [](const Tensors& t) { return Tensors{at::group_norm(t[0], 2, t[1], t[2])}; }};
  });
  custom("batch_norm", [](Draw& d) {
    const int n = d.between(2, 5), c = d.between(1, 4), s = d.between(2, 4);
    return Instance{{random({n, c, s}), random({c}), random({c})},
                    [](const Tensors& t) { return Tensors{at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false)}; }};
  });
  custom("embedding", [](Draw& d) {
    const int rows = d.between(2, 6), width = d.between(1, 5);
    const at::Tensor index = randint(rows, {d.between(1, 4), d.between(1, 4)});
    return Instance{{random({rows, width}), index}, [](const Tensors& t) { return Tensors{at::embedding(t[0], t[1])}; }};
  });
  custom("gather", [](Draw& d) {
    const int a = d.between(1, 5), b = d.between(1, 5);
    return Instance{{random({a, b}), randint(b, {a, 3})}, [](const Tensors& t) { return Tensors{t[0].gather(1, t[1])}; }};
  });
  custom("conv2d", [](Draw& d) {
    const int n = d.between(1, 4), i = d.between(1, 4), o = d.between(1, 4);
    return Instance{{random({n, i, 5, 4}), random({o, i, 3, 2}), random({o})},
                    [](const Tensors& t) { return Tensors{at::conv2d(t[0], t[1], t[2], 2, 1)}; }};
  });
  custom("conv_transpose1d", [](Draw& d) {
    const int n = d.between(1, 4), i = d.between(1, 4), o = d.between(1, 4);
    return Instance{{random({n, i, 5}), random({i, o, 3}), random({o})},
                    [](const Tensors& t) { return Tensors{at::conv_transpose1d(t[0], t[1], t[2], 2, 1)}; }};
  });
  custom("depthwise conv", [](Draw& d) {
    const int n = d.between(1, 4);
    return Instance{{random({n, 4, 5, 4}), random({4, 1, 3, 3})}, [](const Tensors& t) { return Tensors{at::conv2d(t[0], t[1], {}, 1, 1, 1, 4)}; }};
  });
  custom("max_pool2d", [](Draw& d) {
    return Instance{{random({d.between(1, 4), d.between(1, 3), 6, 5})}, [](const Tensors& t) { return Tensors{at::max_pool2d(t[0], 2)}; }};
  });
  custom("avg_pool2d", [](Draw& d) {
    return Instance{{random({d.between(1, 4), d.between(1, 3), 6, 5})}, [](const Tensors& t) { return Tensors{at::avg_pool2d(t[0], 2)}; }};
  });
  custom("attention", [](Draw& d) {
    const int b = d.between(1, 3), h = d.between(1, 4), s = d.between(1, 4), e = 2 * d.between(1, 2);
    const bool causal = d.chance(50);
    return Instance{{random({b, h, s, e}), random({b, h, s, e}), random({b, h, s, e})},
                    [=](const Tensors& t) { return Tensors{at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, causal)}; }};
  });
}

void add_losses() {
  for (const int reduction : {0, 1, 2}) {
    custom("mse_loss", [=](Draw& d) {
      const Shape s = shape(d, 1, 3, 1);
      return Instance{{random(s), random(s)}, [=](const Tensors& t) { return Tensors{at::mse_loss(t[0], t[1], reduction)}; }};
    });
    custom("smooth_l1_loss", [=](Draw& d) {
      const Shape s = shape(d, 1, 3, 1);
      return Instance{{random(s), random(s)}, [=](const Tensors& t) { return Tensors{at::smooth_l1_loss(t[0], t[1], reduction)}; }};
    });
    custom("l1_loss", [=](Draw& d) {
      const Shape s = shape(d, 1, 3, 1);
      return Instance{{random(s), random(s)}, [=](const Tensors& t) { return Tensors{at::l1_loss(t[0], t[1], reduction)}; }};
    });
    custom("bce with logits", [=](Draw& d) {
      const Shape s = shape(d, 1, 3, 1);
      return Instance{{random(s), rand(s, at::kDouble)},
                      [=](const Tensors& t) { return Tensors{at::binary_cross_entropy_with_logits(t[0], t[1], {}, {}, reduction)}; }};
    });
    custom("cross_entropy", [=](Draw& d) {
      const int n = d.between(1, 6), c = d.between(2, 5);
      const bool pixels = d.chance(40), weighted = d.chance(40);
      const Shape scores = pixels ? Shape{n, c, 2, 3} : Shape{n, c}, targets = pixels ? Shape{n, 2, 3} : Shape{n};
      const at::Tensor target = randint(c, targets);
      const at::Tensor weight = positive({c});
      return Instance{{random(scores), target},
                      [=](const Tensors& t) { return Tensors{at::cross_entropy_loss(t[0], t[1], weighted ? weight : at::Tensor(), reduction)}; }};
    });
    custom("kl_div", [=](Draw& d) {
      const Shape s = shape(d, 1, 3, 1);
      return Instance{{random(s), positive(s)}, [=](const Tensors& t) { return Tensors{at::kl_div(t[0], t[1], reduction)}; }};
    });
  }
}

}  // namespace

const std::vector<OperatorCase>& operator_cases() {
  if (all.empty()) {
    add_pointwise();
    add_reductions();
    add_products();
    add_views();
    add_layers();
    add_losses();
  }
  return all;
}

}  // namespace tessera::test
