// Products of matrices and the like.

#include "cases.h"

namespace tessera::test {

void add_products(Cases& c) {
  c.custom("mm", [](Draw& d) {
    const int m = d.between(0, 6), k = d.between(0, 6), n = d.between(0, 6);
    return Instance{{random({m, k}), random({k, n})},
                    [](const Tensors& t) { return Tensors{t[0].mm(t[1])}; }};
  });
  c.custom("mm transposed", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6), n = d.between(1, 6);
    return Instance{{random({k, m}), random({n, k})},
                    [](const Tensors& t) { return Tensors{t[0].t().mm(t[1].t())}; }};
  });
  c.custom("bmm", [](Draw& d) {
    const int b = d.between(0, 4), m = d.between(0, 5), k = d.between(0, 5), n = d.between(0, 5);
    return Instance{{random({b, m, k}), random({b, k, n})},
                    [](const Tensors& t) { return Tensors{t[0].bmm(t[1])}; }};
  });
  c.custom("baddbmm", [](Draw& d) {
    const int b = d.between(1, 4), m = d.between(1, 5), k = d.between(1, 5), n = d.between(1, 5);
    return Instance{
        {random({1, m, n}), random({b, m, k}), random({b, k, n})},
        [](const Tensors& t) { return Tensors{at::baddbmm(t[0], t[1], t[2], 0.5, 2.0)}; }};
  });
  c.custom("addbmm", [](Draw& d) {
    const int b = d.between(1, 4), m = d.between(1, 5), k = d.between(1, 5), n = d.between(1, 5);
    return Instance{{random({m, n}), random({b, m, k}), random({b, k, n})}, [](const Tensors& t) {
                      return Tensors{at::addbmm(t[0], t[1], t[2], 0.5, 2.0)};
                    }};
  });
  c.custom("addmm", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(0, 6), n = d.between(1, 6);
    const Shape s = std::vector<Shape>{{n}, {m, n}, {m, 1}, {}}[d.below(4)];
    return Instance{{random(s), random({m, k}), random({k, n})}, [](const Tensors& t) {
                      return Tensors{at::addmm(t[0], t[1], t[2], 0.5, 2.0)};
                    }};
  });
  c.custom("addmm_", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6), n = d.between(1, 6);
    return Instance{{random({m, n}), random({m, k}), random({k, n})}, [](const Tensors& t) {
                      at::Tensor y = t[0] * 2;
                      return Tensors{y.addmm_(t[1], t[2], 0.5, 2.0)};
                    }};
  });
  c.custom("addmv and addr", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6);
    return Instance{{random({m}), random({m, k}), random({k})}, [](const Tensors& t) {
                      return Tensors{at::addmv(t[0], t[1], t[2]), at::addr(t[1], t[0], t[2])};
                    }};
  });
  c.custom("mv and dot", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6);
    return Instance{{random({m, k}), random({k})},
                    [](const Tensors& t) { return Tensors{t[0].mv(t[1]), t[1].dot(t[1])}; }};
  });
  c.custom("vdot, inner, outer", [](Draw& d) {
    const int m = d.between(1, 6), k = d.between(1, 6);
    return Instance{{random({k}), random({k}), random({m})}, [](const Tensors& t) {
                      return Tensors{at::vdot(t[0], t[1]), at::inner(t[0], t[1]),
                                     at::outer(t[0], t[2])};
                    }};
  });
  c.custom("linear", [](Draw& d) {
    Shape s = shape(d, 0, 3, 1);
    const int k = d.between(1, 6), n = d.between(1, 6);
    s.push_back(k);
    const bool bias = d.chance(60);
    return Instance{
        {random(s), random({n, k}), random({n})}, [=](const Tensors& t) {
          return Tensors{bias ? at::linear(t[0], t[1], t[2]) : at::linear(t[0], t[1]) + t[2]};
        }};
  });
  c.custom("matmul", [](Draw& d) {
    const int b = d.between(1, 3), h = d.between(1, 3), m = d.between(1, 4), k = d.between(1, 4),
              n = d.between(1, 4);
    const Shape other =
        std::vector<Shape>{{k, n}, {b, h, k, n}, {h, k, n}, {1, h, k, n}, {k}}[d.below(5)];
    return Instance{{random({b, h, m, k}), random(other)},
                    [](const Tensors& t) { return Tensors{t[0].matmul(t[1])}; }};
  });
  c.custom("matmul of a vector", [](Draw& d) {
    const int b = d.between(1, 4), k = d.between(1, 4), n = d.between(1, 4);
    return Instance{{random({k}), random({b, k, n})},
                    [](const Tensors& t) { return Tensors{t[0].matmul(t[1])}; }};
  });
  c.custom("einsum", [](Draw& d) {
     const int b = d.between(1, 4), i = d.between(1, 4), j = d.between(1, 4), k = d.between(1, 4);
     const int which = d.below(5);
     const Shape first{b, i, k},
         second = std::vector<Shape>{{b, j, k}, {k, j}, {b, i, k}, {b, i}, {j}}[which];
     const std::string equation = std::vector<std::string>{
         "bik,bjk->bij", "bik,kj->jbi", "bik,bik->b", "bik,bi->bk", "bik,j->bijk"}[which];
     return Instance{{random(first), random(second)},
                     [=](const Tensors& t) { return Tensors{at::einsum(equation, {t[0], t[1]})}; }};
   }).any_strides();
  c.custom("einsum of three", [](Draw& d) {
     const int b = d.between(1, 4), i = d.between(1, 4), j = d.between(1, 4), k = d.between(1, 4);
     return Instance{{random({b, i}), random({i, j}), random({j, k})},
                     [=](const Tensors& t) { return Tensors{at::einsum("bi,ij,jk->bk", t)}; }};
   }).any_strides();
  c.custom("bilinear", [](Draw& d) {
     const int b = d.between(1, 4), i = d.between(1, 4), j = d.between(1, 4), o = d.between(1, 4);
     return Instance{
         {random({b, i}), random({b, j}), random({o, i, j}), random({o})},
         [](const Tensors& t) { return Tensors{at::bilinear(t[0], t[1], t[2], t[3])}; }};
   }).any_strides();
  c.custom("tensordot", [](Draw& d) {
     const int a = d.between(1, 4), b = d.between(1, 4), e = d.between(1, 4), f = d.between(1, 4);
     return Instance{{random({a, b, e}), random({b, f, a})}, [](const Tensors& t) {
                       return Tensors{at::tensordot(t[0], t[1], {0, 1}, {2, 0})};
                     }};
   }).any_strides();
  c.custom("kron", [](Draw& d) {
    return Instance{
        {random({d.between(1, 3), d.between(1, 3)}), random({d.between(1, 3), d.between(1, 3)})},
        [](const Tensors& t) { return Tensors{at::kron(t[0], t[1])}; }};
  });
  c.custom("cdist",
           [](Draw& d) {
             const int b = d.between(1, 3), p = d.between(1, 4), r = d.between(1, 4),
                       m = d.between(1, 4);
             return Instance{{random({b, p, m}), random({b, r, m})}, [](const Tensors& t) {
                               return Tensors{at::cdist(t[0], t[1], 2.0, 2)};
                             }};
           })
      .double_only()
      .may_refuse();
  c.custom("matrix_power", [](Draw& d) {
     const int b = d.between(1, 3), n = d.between(1, 4);
     return Instance{{random({b, n, n})},
                     [](const Tensors& t) { return Tensors{at::matrix_power(t[0], 3)}; }};
   }).finite();
  c.custom("cholesky and solve",
           [](Draw& d) {
             const int b = d.between(1, 4), n = d.between(1, 4);
             return Instance{{random({b, n, n}), random({b, n, 2})}, [=](const Tensors& t) {
                               const at::Tensor a =
                                   t[0].matmul(t[0].mT()) +
                                   at::eye(n, at::TensorOptions(at::kDouble).device(t[0].device()));
                               return Tensors{at::linalg_cholesky(a), at::linalg_solve(a, t[1])};
                             }};
           })
      .double_only()
      .may_refuse();
  c.custom("det and inverse",
           [](Draw& d) {
             const int b = d.between(1, 4), n = d.between(1, 4);
             return Instance{
                 {random({b, n, n})}, [=](const Tensors& t) {
                   const at::Tensor a =
                       t[0] + 4 * at::eye(n, at::TensorOptions(at::kDouble).device(t[0].device()));
                   return Tensors{at::linalg_det(a), at::linalg_inv(a)};
                 }};
           })
      .double_only()
      .may_refuse();
}

}  // namespace tessera::test
