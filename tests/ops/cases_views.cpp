// Views, and what joins tensors.

#include "cases.h"

namespace tessera::test {

void add_views(Cases& c) {
  c.unary("flatten", [](const auto& x) { return x.flatten() * 2; });
  c.unary("unsqueeze and squeeze", [](const auto& x) { return x.unsqueeze(0).exp().squeeze(); }, 1);
  c.along("squeeze.dim", [](const auto& x, auto dim) { return x.squeeze(dim) * 2; }, 0);
  c.custom("expand", [](Draw& d) {
    const int a = d.between(0, 4), b = d.between(1, 5), e = d.chance(50) ? 1 : d.between(1, 4);
    return Instance{{random({a, 1, e})}, [=](const Tensors& t) {
                      return Tensors{t[0].expand({a, b, e == 1 ? 3 : -1}) * 2};
                    }};
  });
  c.unary("expand_as", [](const auto& x) { return x.sum().expand_as(x) * x; });
  c.unary("broadcast_to", [](const auto& x) {
    Shape s = x.sizes().vec();
    s.insert(s.begin(), 2);
    return x.broadcast_to(s) * 2;
  });
  c.unary("repeat", [](const auto& x) { return x.repeat({2, 1, 1, 3}); }, 0);
  c.unary("tile", [](const auto& x) { return x.tile({2, 2}); }, 1);
  c.unary("transpose", [](const auto& x) { return x.transpose(0, -1).exp(); }, 1);
  c.unary("t and mT", [](const auto& x) { return x.dim() == 2 ? x.t() * 2 : x.mT() * 2; }, 2);
  c.unary("movedim", [](const auto& x) { return x.movedim(0, -1) * 2; }, 1);
  c.unary("swapaxes", [](const auto& x) { return x.swapaxes(0, 1) * 2; }, 2);
  c.unary("view_as_real",
          [](const auto& x) { return x.is_complex() ? at::view_as_real(x) * 2 : x * 1; });
  c.unary("ravel", [](const auto& x) { return x.ravel() + 1; });
  c.along("slice", [](const auto& x, auto dim) { return x.slice(dim, 1, 5, 2) * 2; }, 0);
  c.along(
      "slice from the end", [](const auto& x, auto dim) { return x.slice(dim, -3, -1) * 2; }, 0);
  c.along(
      "slices of slices",
      [](const auto& x, auto dim) {
        return x.slice(dim, 1, 99).slice(dim, 0, 3).slice(dim, 1, 99, 2) * 2;
      },
      0);
  c.along("narrow", [](const auto& x, auto dim) {
    return x.narrow(dim, x.size(dim) / 3, x.size(dim) / 2) * 2;
  });
  c.along("select", [](const auto& x, auto dim) { return x.select(dim, -1) * 2; });
  c.along("select first", [](const auto& x, auto dim) { return x.select(dim, 0) * 2; });
  c.along_all("unbind", [](const auto& x, auto dim) { return x.unbind(dim); });
  c.along_all("chunk", [](const auto& x, auto dim) { return x.chunk(2, dim); });
  c.along("split", [](const auto& x, auto dim) { return at::cat(x.split(2, dim), dim); });
  c.along_all("tensor_split", [](const auto& x, auto dim) { return x.tensor_split(3, dim); });
  c.along_all("split_with_sizes", [](const auto& x, auto dim) {
    return x.split_with_sizes({1, x.size(dim) - 1}, dim);
  });
  c.along("unfold",
          [](const auto& x, auto dim) { return x.unfold(dim, (x.size(dim) + 1) / 2, 2) * 2; });
  c.along("unflatten", [](const auto& x, auto dim) { return x.unflatten(dim, {1, -1}) * 2; });
  c.custom("unflatten evenly", [](Draw& d) {
    const int a = d.between(1, 3), b = d.between(1, 3), e = d.between(1, 4);
    return Instance{{random({e, a * b, e})},
                    [=](const Tensors& t) { return Tensors{t[0].unflatten(1, {a, b}) * 2}; }};
  });
  c.custom("permute and reshape", [](Draw& d) {
    const int a = d.between(1, 4), b = d.between(1, 4), e = d.between(1, 4);
    const int which = d.below(6);
    return Instance{{random({a, b, e})}, [=](const Tensors& t) -> Tensors {
                      switch (which) {
                        case 0:
                          return {t[0].permute({2, 0, 1}).reshape({e, a * b}) * 2};
                        case 1:
                          return {t[0].reshape({a * b, e}).view({a, b, e}) * 2};
                        case 2:
                          return {t[0].transpose(0, 1).contiguous().view({b, a * e}) * 2};
                        case 3:
                          return {t[0].reshape({a * b * e}) * 2};
                        case 4:
                          return {t[0].flatten(1) * 2};
                        default:
                          return {t[0].reshape({a, 1, b * e}) * 2};
                      }
                    }};
  });
  c.custom("split heads", [](Draw& d) {
    const int b = d.between(1, 3), s = d.between(1, 4), h = d.between(1, 4);
    return Instance{{random({b, s, h * 2})}, [=](const Tensors& t) {
                      return Tensors{t[0].reshape({b, s, h, 2}).transpose(1, 2).contiguous() * 2};
                    }};
  });
  c.custom("merge heads", [](Draw& d) {
    const int b = d.between(1, 3), s = d.between(1, 4), h = d.between(1, 4);
    return Instance{{random({b, h, s, 2})}, [=](const Tensors& t) {
                      return Tensors{t[0].transpose(1, 2).reshape({b, s, h * 2}) * 2};
                    }};
  });
  c.custom("diagonal", [](Draw& d) {
    const int offset = d.between(-1, 1);
    return Instance{{random({d.between(2, 5), d.between(2, 5), d.between(1, 3)})},
                    [=](const Tensors& t) {
                      return Tensors{t[0].diagonal(offset) * 2, t[0].diagonal(0, -1, 1) * 2};
                    }};
  });
  c.custom("diag and diag_embed", [](Draw& d) {
    const int n = d.between(1, 5), offset = d.between(-1, 1);
    return Instance{{random({n}), random({n, n}), random({2, n})}, [=](const Tensors& t) {
                      return Tensors{at::diag(t[0], offset), at::diag(t[1]),
                                     at::diag_embed(t[2], offset)};
                    }};
  });
  c.custom("tril", [](Draw& d) {
    return Instance{
        {random({d.between(1, 3), d.between(0, 5), d.between(1, 5)})},
        [](const Tensors& t) { return Tensors{t[0].tril(), t[0].triu(1), t[0].tril(-1)}; }};
  });
  c.custom("pad", [](Draw& d) {
    const int a = d.between(0, 2), b = d.between(0, 2), e = d.between(0, 1);
    return Instance{
        {random({d.between(1, 3), d.between(1, 5), d.between(1, 5)})},
        [=](const Tensors& t) { return Tensors{at::constant_pad_nd(t[0], {a, b, e, 0}, 0.5)}; }};
  });
  c.custom("pixel_shuffle", [](Draw& d) {
     const int b = d.between(1, 3), k = d.between(1, 3), h = d.between(1, 3), w = d.between(1, 3);
     return Instance{{random({b, 4 * k, h, w}), random({b, k, 2 * h, 2 * w})},
                     [](const Tensors& t) {
                       return Tensors{at::pixel_shuffle(t[0], 2), at::pixel_unshuffle(t[1], 2)};
                     }};
   }).any_strides();
  c.custom("rot90", [](Draw& d) {
     const int k = d.between(0, 3);
     return Instance{{random({d.between(1, 4), d.between(1, 4), 2})},
                     [=](const Tensors& t) { return Tensors{at::rot90(t[0], k)}; }};
   }).any_strides();
  c.custom("view as another shape of the same memory", [](Draw& d) {
    const int a = d.between(1, 4), b = d.between(1, 4);
    return Instance{{random({a, b, 2})}, [=](const Tensors& t) {
                      return Tensors{t[0].contiguous().view({a, b * 2}).view({a * b, 2}).t() * 2};
                    }};
  });
  c.custom("atleast and meshgrid", [](Draw& d) {
    const int a = d.between(1, 4), b = d.between(1, 4);
    return Instance{{random({a}), random({b})}, [](const Tensors& t) {
                      auto grid = at::meshgrid({t[0], t[1]}, "ij");
                      return Tensors{at::atleast_2d(t[0]) * 2, grid[0] * grid[1]};
                    }};
  });
}

void add_joins(Cases& c) {
  c.along("stack", [](const auto& x, auto dim) { return at::stack({x, x * 2}, dim); }, 0);
  c.custom("cat", [](Draw& d) {
    Shape a = shape(d, 1, 3, 1), b = a;
    const int dim = d.below(static_cast<int>(a.size()));
    b[dim] = d.between(0, 4);
    return Instance{{random(a), random(b)},
                    [=](const Tensors& t) { return Tensors{at::cat({t[0], t[1], t[0]}, dim)}; }};
  });
  c.custom("stack of two", [](Draw& d) {
    const Shape a = shape(d, 0, 3);
    const int dim = d.below(static_cast<int>(a.size()) + 1);
    return Instance{{random(a), random(a)},
                    [=](const Tensors& t) { return Tensors{at::stack({t[0], t[1]}, dim)}; }};
  });
  c.custom("hstack, vstack, dstack", [](Draw& d) {
    const int a = d.between(1, 4), b = d.between(1, 4);
    return Instance{{random({a, b}), random({a, b})}, [](const Tensors& t) {
                      return Tensors{at::hstack({t[0], t[1]}), at::vstack({t[0], t[1]}),
                                     at::dstack({t[0], t[1]})};
                    }};
  });
  c.custom("block_diag", [](Draw& d) {
     return Instance{
         {random({d.between(1, 3), d.between(1, 3)}), random({d.between(1, 3), d.between(1, 3)})},
         [](const Tensors& t) { return Tensors{at::block_diag({t[0], t[1]})}; }};
   }).may_refuse();
  c.custom("broadcast_tensors", [](Draw& d) {
    const Shape a = shape(d, 1, 3, 1);
    return Instance{{random(a), random(narrower(d, a))}, [](const Tensors& t) {
                      auto all = at::broadcast_tensors({t[0], t[1]});
                      return Tensors{all[0] * 2, all[1] * 2};
                    }};
  });
}

// Writes to views and slices, and their gradients.
void add_writes(Cases& c) {
  c.along("write to a slice", [](const auto& x, auto dim) {
     at::Tensor y = x * 1;
     y.narrow(dim, 0, (y.size(dim) + 1) / 2).mul_(3);
     return y * x;
   }).no_partial();
  c.along("assign a number to a row",
          [](const auto& x, auto dim) {
            at::Tensor y = x * 1;
            y.select(dim, y.size(dim) / 2).fill_(3);
            return y * x;
          })
      .no_partial()
      .views_anew();
  c.along("assign a tensor to a row",
          [](const auto& x, auto dim) {
            at::Tensor y = x * 1;
            y.select(dim, -1).copy_(x.select(dim, 0) * 2);
            return y * x;
          })
      .no_partial()
      .views_anew();
  c.along("assign a slice to another",
          [](const auto& x, auto dim) {
            at::Tensor y = x * 1;
            const auto n = y.size(dim) / 2;
            y.narrow(dim, y.size(dim) - n, n).copy_(x.narrow(dim, 0, n) * 2);
            return y * x;
          })
      .no_partial()
      .views_anew();
  c.custom("in place through a transpose",
           [](Draw& d) {
             return Instance{{random({d.between(1, 5), d.between(1, 5)})}, [](const Tensors& t) {
                               at::Tensor y = t[0] * 1;
                               y.t().mul_(2);
                               y.view({-1}).add_(1);
                               return Tensors{y * t[0]};
                             }};
           })
      .no_partial()
      .views_anew();
  c.along(
       "select_scatter",
       [](const auto& x, auto dim) { return at::select_scatter(x, x.select(dim, 0) * 3, dim, -1); })
      .any_strides()
      .real_only();
  c.along("slice_scatter",
          [](const auto& x, auto dim) {
            return at::slice_scatter(x, x.slice(dim, 0, 1) * 3, dim, x.size(dim) - 1, x.size(dim));
          })
      .any_strides()
      .real_only();
  c.custom("diagonal_scatter", [](Draw& d) {
     const Shape s = shape(d, 2, 4, 1);
     const int n = static_cast<int>(s.size()), a = d.below(n), b = (a + 1 + d.below(n - 1)) % n;
     return Instance{{random(s)}, [=](const Tensors& t) {
                       const at::Tensor of = t[0].diagonal(0, a, b) * 3;
                       return Tensors{at::diagonal_scatter(t[0], of, 0, a, b)};
                     }};
   }).real_only();
  c.custom("in-place metadata", [](Draw& d) {
    return Instance{{random({d.between(1, 5), d.between(1, 5)})}, [](const Tensors& t) {
                      at::Tensor y = t[0] * 1;
                      y.t_().unsqueeze_(0).squeeze_(0).transpose_(0, 1);
                      return Tensors{y * t[0]};
                    }};
  });
}

}  // namespace tessera::test
