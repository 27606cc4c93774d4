// Elements picked and written by index.

#include "cases.h"

namespace tessera::test {

namespace {

at::Tensor indices(std::int64_t high, const Shape& s) { return randint(high, s); }
// Each index at most once.
at::Tensor unique(std::int64_t high, std::int64_t n) {
  return at::randperm(high, generator(), at::TensorOptions(at::kLong)).slice(0, 0, n);
}

// A tensor, one of its dims, and indices along it.
OperatorCase& picking(Cases& c, const char* name,
                      std::function<Tensors(const Tensors&, std::int64_t)> f, bool once = false) {
  return c.custom(name, [=](Draw& d) {
    const at::Tensor x = random(shape(d, 1, 3, 1));
    const int dim = dim_of(d, x);
    const auto n = x.size(dim);
    const at::Tensor index =
        once ? unique(n, d.between(0, static_cast<int>(n))) : indices(n, {d.between(0, 5)});
    Shape s = x.sizes().vec();
    s[dim] = index.numel();
    return Instance{{x, index, random(s)}, [=](const Tensors& t) { return f(t, dim); }};
  });
}

// An index tensor of the input's dims, at most its size in the others.
OperatorCase& gathering(Cases& c, const char* name,
                        std::function<Tensors(const Tensors&, std::int64_t)> f, bool full = false) {
  return c.custom(name, [=](Draw& d) {
    const at::Tensor x = random(shape(d, 1, 3, 1));
    const int dim = dim_of(d, x);
    Shape s = x.sizes().vec();
    for (std::size_t i = 0; i < s.size(); ++i) {
      if (static_cast<int>(i) == dim ? !full : d.chance(25))
        s[i] = d.between(0, static_cast<int>(s[i]));
    }
    return Instance{{x, indices(x.size(dim), s), random(s)},
                    [=](const Tensors& t) { return f(t, dim); }};
  });
}

}  // namespace

void add_indexing(Cases& c) {
  picking(c, "index_select",
          [](const Tensors& t, auto dim) { return Tensors{t[0].index_select(dim, t[1])}; });
  picking(c, "index_add",
          [](const Tensors& t, auto dim) { return Tensors{t[0].index_add(dim, t[1], t[2], 0.5)}; });
  picking(
      c, "index_copy",
      [](const Tensors& t, auto dim) { return Tensors{t[0].index_copy(dim, t[1], t[2])}; }, true);
  picking(c, "index_fill",
          [](const Tensors& t, auto dim) { return Tensors{t[0].index_fill(dim, t[1], 0.5)}; });
  picking(c, "index_add_", [](const Tensors& t, auto dim) {
    at::Tensor y = t[0] * 1;
    y.index_add_(dim, t[1], t[2]);
    return Tensors{y * t[0]};
  }).may_refuse();
  picking(c, "index_reduce",
          [](const Tensors& t, auto dim) {
            return Tensors{t[0].index_reduce(dim, t[1], t[2], "amax")};
          })
      .double_only()
      .may_refuse();
  picking(c, "index by a tensor", [](const Tensors& t, auto dim) {
    std::vector<at::indexing::TensorIndex> at(dim, at::indexing::Slice());
    at.emplace_back(t[1]);
    return Tensors{t[0].index(at)};
  });
  picking(
      c, "assign by a tensor",
      [](const Tensors& t, auto dim) {
        at::Tensor y = t[0] * 1;
        std::vector<at::indexing::TensorIndex> at(dim, at::indexing::Slice());
        at.emplace_back(t[1]);
        y.index_put_(at, t[2]);
        return Tensors{y * t[0]};
      },
      true);
  picking(c, "accumulate by a tensor", [](const Tensors& t, auto dim) {
    at::Tensor y = t[0] * 1;
    c10::List<std::optional<at::Tensor>> at;
    for (int i = 0; i < dim; ++i) at.push_back(std::optional<at::Tensor>());
    at.push_back(std::optional<at::Tensor>(t[1]));
    at::index_put_(y, at, t[2], true);
    return Tensors{y * t[0]};
  });
  c.custom("index by two tensors", [](Draw& d) {
    const int a = d.between(1, 5), b = d.between(1, 5), n = d.between(0, 4);
    return Instance{{random({a, b, d.between(1, 3)}), indices(a, {n}), indices(b, {n})},
                    [](const Tensors& t) { return Tensors{t[0].index({t[1], t[2]})}; }};
  });
  c.custom("index by two tensors apart", [](Draw& d) {
    const int a = d.between(1, 5), b = d.between(1, 5), n = d.between(0, 4);
    return Instance{
        {random({a, d.between(1, 3), b}), indices(a, {n}), indices(b, {d.chance(20) ? 0 : 2, 1})},
        [](const Tensors& t) { return Tensors{t[0].index({t[1], at::indexing::Slice(), t[2]})}; }};
  });
  c.custom("index by a mask", [](Draw& d) {
     const Shape s = shape(d, 1, 2, 1);
     return Instance{{random(s), random(s)}, [](const Tensors& t) {
                       return Tensors{t[0].index({t[1] > 0}), t[0].masked_select(t[1] > 0.5)};
                     }};
   }).real_only();
  c.custom("assign by a mask", [](Draw& d) {
     const Shape s = shape(d, 1, 3, 1);
     return Instance{{random(s), random(s)}, [](const Tensors& t) {
                       at::Tensor y = t[0] * 1;
                       y.index_put_({t[1] > 0}, 2.5);
                       return Tensors{y * t[0]};
                     }};
   }).real_only();
  gathering(c, "gather",
            [](const Tensors& t, auto dim) { return Tensors{t[0].gather(dim, t[1])}; });
  gathering(
      c, "take_along_dim",
      [](const Tensors& t, auto dim) { return Tensors{at::take_along_dim(t[0], t[1], dim)}; },
      true);
  gathering(c, "scatter value",
            [](const Tensors& t, auto dim) { return Tensors{t[0].scatter(dim, t[1], 0.5)}; });
  gathering(c, "scatter_add",
            [](const Tensors& t, auto dim) { return Tensors{t[0].scatter_add(dim, t[1], t[2])}; });
  gathering(c, "scatter_add_", [](const Tensors& t, auto dim) {
    at::Tensor y = t[0] * 1;
    y.scatter_add_(dim, t[1], t[2]);
    return Tensors{y * t[0]};
  }).may_refuse();
  gathering(c, "scatter_reduce", [](const Tensors& t, auto dim) {
    return Tensors{t[0].scatter_reduce(dim, t[1], t[2], "sum")};
  }).may_refuse();
  c.custom("scatter", [](Draw& d) {
    const int a = d.between(1, 5), b = d.between(1, 6), n = d.between(0, b);
    at::Tensor index = at::empty({a, n}, at::kLong);
    for (int i = 0; i < a; ++i) index[i].copy_(unique(b, n));
    return Instance{{random({a, b}), index, random({a, n})},
                    [](const Tensors& t) { return Tensors{t[0].scatter(1, t[1], t[2])}; }};
  });
  c.custom("packed sequences", [](Draw& d) {
     const int samples = d.between(1, 4), steps = d.between(1, 5);
     std::vector<std::int64_t> lengths{steps};
     while (static_cast<int>(lengths.size()) < samples)
       lengths.push_back(d.between(1, static_cast<int>(lengths.back())));
     return Instance{{random({samples, steps, 2})}, [=](const Tensors& t) {
                       const auto [data, sizes] =
                           at::_pack_padded_sequence(t[0], at::tensor(lengths, at::kLong), true);
                       return Tensors{std::get<0>(
                           at::_pad_packed_sequence(data * 2, sizes, true, -1.0, steps))};
                     }};
   }).real_only();
  c.custom("one_hot", [](Draw& d) {
     return Instance{{random({3}), indices(3, {d.between(0, 5)})}, [](const Tensors& t) {
                       return Tensors{at::one_hot(t[1], 3).to(at::kDouble).mul(t[0])};
                     }};
   }).double_only();
  c.custom("take", [](Draw& d) {
    const Shape s = shape(d, 1, 2, 1);
    std::int64_t n = 1;
    for (const auto k : s) n *= k;
    return Instance{{random(s), indices(n, {d.between(0, 4)})},
                    [](const Tensors& t) { return Tensors{at::take(t[0], t[1])}; }};
  });
  c.custom("put", [](Draw& d) {
    const Shape s = shape(d, 0, 3, 1);
    std::int64_t n = 1;
    for (const auto k : s) n *= k;
    const bool accumulate = d.chance(50);
    const std::int64_t count = d.between(0, static_cast<int>(std::min<std::int64_t>(n, 4)));
    return Instance{{random(s), unique(n, count), random({count})}, [=](const Tensors& t) {
                      return Tensors{at::put(t[0], t[1], t[2], accumulate)};
                    }};
  });
  c.custom("masked_scatter", [](Draw& d) {
     const Shape s = shape(d, 0, 3, 1);
     std::int64_t n = 1;
     for (const auto k : s) n *= k;
     return Instance{{random(s), random(s), random({n + d.below(3)})}, [](const Tensors& t) {
                       at::Tensor y = t[0] * 2;
                       y.masked_scatter_(t[1] > 0, t[2]);
                       return Tensors{y, t[0].masked_scatter(t[1] > 0.5, t[2])};
                     }};
   }).real_only();
  c.custom("searchsorted, bucketize", [](Draw& d) {
     return Instance{
         {random({d.between(1, 5), d.between(1, 4)}), at::arange(4, at::kDouble) * 0.5 - 1},
         [](const Tensors& t) {
           return Tensors{at::bucketize(t[0], t[1]), at::searchsorted(t[1], t[0])};
         }};
   }).double_only();
  c.custom("embedding", [](Draw& d) {
    const int rows = d.between(2, 6), width = d.between(1, 5);
    return Instance{{random({rows, width}), indices(rows, shape(d, 1, 2, 0))},
                    [](const Tensors& t) { return Tensors{at::embedding(t[0], t[1])}; }};
  });
  c.custom("embedding with padding", [](Draw& d) {
    const int rows = d.between(2, 6), width = d.between(1, 5), padding = d.below(rows);
    return Instance{{random({rows, width}), indices(rows, {d.between(1, 4), d.between(1, 4)})},
                    [=](const Tensors& t) { return Tensors{at::embedding(t[0], t[1], padding)}; }};
  });
  c.custom("embedding_bag",
           [](Draw& d) {
             const int rows = d.between(2, 6), width = d.between(1, 5), mode = d.below(2);
             return Instance{
                 {random({rows, width}), indices(rows, {d.between(1, 4), d.between(1, 4)})},
                 [=](const Tensors& t) {
                   return Tensors{
                       F::embedding_bag(t[1], t[0],
                                        mode ? F::EmbeddingBagFuncOptions().mode(torch::kMean)
                                             : F::EmbeddingBagFuncOptions().mode(torch::kSum))};
                 }};
           })
      .double_only()
      .may_refuse();
  c.along("flip", [](const auto& x, auto dim) { return x.flip(dim); }, 0);
  c.unary("flip of all dims", [](const auto& x) {
    Shape dims(x.dim());
    for (std::size_t i = 0; i < dims.size(); ++i) dims[i] = static_cast<std::int64_t>(i);
    return x.flip(dims);
  });
  c.along("roll", [](const auto& x, auto dim) { return x.roll(1, dim); }, 0);
  c.unary("roll of all", [](const auto& x) { return x.roll(2); }, 1);
  c.along("repeat_interleave", [](const auto& x, auto dim) { return x.repeat_interleave(2, dim); });
  c.custom("repeat_interleave by a tensor", [](Draw& d) {
    const at::Tensor x = random(shape(d, 1, 3, 1));
    const int dim = dim_of(d, x);
    const at::Tensor times = indices(3, {d.chance(20) ? 1 : x.size(dim)});
    return Instance{{x, times},
                    [=](const Tensors& t) { return Tensors{t[0].repeat_interleave(t[1], dim)}; }};
  });
  c.unary("nonzero", [](const auto& x) { return at::nonzero(x > 0); }).real_only().may_refuse();
  c.unary(
       "unique", [](const auto& x) { return std::get<0>(at::_unique(x)); }, 1, 1)
      .double_only()
      .may_refuse();
  c.along("histc", [](const auto& x, auto) { return at::histc(x, 4, -1, 1); })
      .double_only()
      .may_refuse();
  c.unary(
       "bincount",
       [](const auto& x) { return at::bincount(x.abs().to(at::kLong).flatten(), {}, 4); }, 1, 1)
      .double_only()
      .may_refuse();
}

}  // namespace tessera::test
