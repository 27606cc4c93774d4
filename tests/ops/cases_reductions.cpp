// Reductions, and operators along one dim: softmax, scans, sorts.

#include "../support/old_libtorch.h"
#include "cases.h"

namespace tessera::test {

namespace {

// libtorch 2.11 has no derivative of aminmax.
at::Tensor for_aminmax(const at::Tensor& x) { return kOldLibtorch ? x.detach() : x; }

// At least as many columns as rows: libtorch 2.11 gives a tall matrix' trace a gradient beyond the
// diagonal. It has no trace of half precision either.
at::Tensor for_trace(const at::Tensor& x) {
  const at::Tensor matrix =
      x.reshape({-1, std::max<std::int64_t>(x.size(-1), 1)})
          .to(kOldLibtorch && at::isReducedFloatingType(x.scalar_type()) ? at::kFloat
                                                                         : x.scalar_type());
  return matrix.size(0) > matrix.size(1) ? matrix.t() : matrix;
}

}  // namespace

void add_reductions(Cases& c) {
  c.unary("sum all", [](const auto& x) { return x.sum(); });
  c.unary("sum in double", [](const auto& x) { return x.sum(at::kDouble); }).real_only();
  c.unary("mean all", [](const auto& x) { return x.mean(); }, 0, 1);
  c.unary("var all", [](const auto& x) { return x.var(); }, 1, 2).real_only();
  c.unary("max all", [](const auto& x) { return x.max(); }, 0, 1).double_only();
  c.unary("min all", [](const auto& x) { return x.min(); }, 0, 1).double_only();
  c.unary("norm all", [](const auto& x) { return x.norm(); }, 0, 1);
  c.unary("prod all", [](const auto& x) { return x.prod(); });
  c.unary("any", [](const auto& x) { return (x > 1).any().to(at::kDouble) * x; }).double_only();
  c.unary("all", [](const auto& x) { return (x > -1).all().to(at::kDouble) * x; }).double_only();
  c.unary("argmax all", [](const auto& x) { return x.argmax(); }, 0, 1).double_only();
  c.unary("median all", [](const auto& x) { return x.median(); }, 1, 1).double_only();
  c.unary("trace", [](const auto& x) { return for_trace(x).trace(); }, 1, 1);
  c.unary("count_nonzero", [](const auto& x) { return at::count_nonzero(x.relu()); }).double_only();
  c.unary("nansum", [](const auto& x) { return at::nansum(x); }).double_only();
  c.unary(
       "aminmax",
       [](const auto& x) {
         const auto [low, high] = at::aminmax(for_aminmax(x));
         return high - low * 2;
       },
       0, 1)
      .double_only();
  c.reduction("sum", [](const auto& x, auto dims, bool keep) { return x.sum(dims, keep); }, 0);
  c.reduction(
       "sum of bool", [](const auto& x, auto dims, bool keep) { return (x > 0).sum(dims, keep); },
       0)
      .double_only();
  c.reduction("mean", [](const auto& x, auto dims, bool keep) { return x.mean(dims, keep); });
  c.reduction(
      "var", [](const auto& x, auto dims, bool keep) { return x.var(dims, c10::Scalar(0), keep); });
  c.reduction(
      "std", [](const auto& x, auto dims, bool keep) { return x.std(dims, c10::Scalar(0), keep); },
      2);
  c.reduction("var_mean", [](const auto& x, auto dims, bool keep) {
    const auto [v, m] = at::var_mean(x, dims, c10::Scalar(0), keep);
    return v + m * 2;
  });
  c.reduction("amax", [](const auto& x, auto dims, bool keep) {
     return x.amax(dims, keep);
   }).real_only();
  c.reduction("amin", [](const auto& x, auto dims, bool keep) {
     return x.amin(dims, keep);
   }).real_only();
  for (const double p :
       {0.0, 1.0, 2.0, 3.0, 0.5, static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    auto& norm = c.reduction(concat("vector norm ", p), [p](const auto& x, auto dims, bool keep) {
                    return at::linalg_vector_norm(x, p, dims, keep);
                  }).real_only();
    // Of one element libtorch takes the absolute value, however large its power is.
    if (p == 3) norm.ordinary();
  }
  c.reduction("norm with dims", [](const auto& x, auto dims, bool keep) {
    return at::norm(x, c10::Scalar(2), dims, keep);
  });
  c.reduction("logsumexp", [](const auto& x, auto dims, bool keep) {
     return x.logsumexp(dims, keep);
   }).real_only();
  c.reduction(
       "any with dims", [](const auto& x, auto dims, bool keep) { return (x > 1).any(dims, keep); },
       0)
      .double_only();
  c.reduction(
       "all with dims",
       [](const auto& x, auto dims, bool keep) { return (x > -1).all(dims, keep); }, 0)
      .double_only();
  c.reduction("nansum with dims", [](const auto& x, auto dims, bool keep) {
     return at::nansum(x, dims, keep);
   }).double_only();
  c.along("prod", [](const auto& x, auto dim) { return (x.abs() * 0.1 + 0.5).prod(dim); });
  c.along_all("max.dim", [](const auto& x, auto dim) {
     const auto [v, i] = x.max(dim);
     return Tensors{v, i};
   }).double_only();
  c.along_all("min.dim", [](const auto& x, auto dim) {
     const auto [v, i] = x.min(dim, true);
     return Tensors{v, i};
   }).double_only();
  c.along_all("median.dim", [](const auto& x, auto dim) {
     // libtorch 2.15 leaves parts of the result of an expanded tensor unwritten.
     const auto [v, i] = x.contiguous().median(dim);
     return Tensors{v, i};
   }).double_only();
  c.along_all("kthvalue", [](const auto& x, auto dim) {
     const auto [v, i] = x.kthvalue((x.size(dim) + 1) / 2, dim);
     return Tensors{v, i};
   }).double_only();
  c.along_all("mode", [](const auto& x, auto dim) {
     const auto [v, i] = x.mode(dim);
     return Tensors{v, i};
   }).double_only();
  c.along("argmax", [](const auto& x, auto dim) { return x.argmax(dim); }).double_only();
  c.along("argmin", [](const auto& x, auto dim) { return x.argmin(dim, true); }).double_only();
  c.along("quantile", [](const auto& x, auto dim) { return at::quantile(x, 0.3, dim); })
      .double_only()
      .no_ties();
  c.custom("quantiles",
           [](Draw& d) {
             static constexpr const char* kinds[] = {"linear", "lower", "higher", "midpoint",
                                                     "nearest"};
             const Shape s = shape(d, 0, 3, 1);
             const std::string how = kinds[d.below(5)];
             const std::optional<std::int64_t> dim =
                 s.empty() || d.chance(30)
                     ? std::nullopt
                     : std::optional<std::int64_t>(d.below(static_cast<int>(s.size())));
             const bool keep = d.chance(50), skip = d.chance(50), gap = d.chance(50);
             return Instance{{random(s), at::tensor({0.0, 0.37, 1.0}, at::kDouble)},
                             [=](const Tensors& t) {
                               const at::Tensor x =
                                   gap ? at::where(t[0] < 0, at::full_like(t[0], NAN), t[0]) : t[0];
                               const at::Tensor q = t[1].detach();
                               return Tensors{skip ? at::nanquantile(x, q, dim, keep, how)
                                                   : at::quantile(x, q, dim, keep, how)};
                             }};
           })
      .double_only()
      .no_ties();
  c.along_all("aminmax.dim", [](const auto& x, auto dim) {
     const auto [low, high] = at::aminmax(for_aminmax(x), dim, true);
     return Tensors{low, high};
   }).double_only();
  c.binary(
       "dist", [](const auto& a, const auto& b) { return at::dist(a, b, 2); }, true)
      .double_only();
  c.custom("cosine_similarity", [](Draw& d) {
     const Shape s = shape(d, 1, 3, 1);
     const int dim = d.below(static_cast<int>(s.size()));
     return Instance{{random(s), random(s)}, [=](const Tensors& t) {
                       return Tensors{at::cosine_similarity(t[0], t[1], dim)};
                     }};
   }).real_only();
}

void add_scans(Cases& c) {
  c.along("cumsum", [](const auto& x, auto dim) { return x.cumsum(dim); }, 0);
  c.along("cumprod", [](const auto& x, auto dim) { return (x.abs() * 0.1 + 0.5).cumprod(dim); });
  c.along("logcumsumexp", [](const auto& x, auto dim) {
     return x.logcumsumexp(dim);
   }).double_only();
  c.along_all("cummax", [](const auto& x, auto dim) {
     const auto [v, i] = x.cummax(dim);
     return Tensors{v, i};
   }).double_only();
  c.along_all("cummin", [](const auto& x, auto dim) {
     const auto [v, i] = x.cummin(dim);
     return Tensors{v, i};
   }).double_only();
  c.along("diff", [](const auto& x, auto dim) { return x.diff(1, dim); });
  c.along("softmax", [](const auto& x, auto dim) { return x.softmax(dim); }, 0).real_only();
  c.along("log_softmax", [](const auto& x, auto dim) { return x.log_softmax(dim); }, 0).real_only();
  c.along("softmax in float", [](const auto& x, auto dim) {
     return x.to(at::kFloat).softmax(dim, at::kDouble);
   }).double_only();
  c.along("softmin", [](const auto& x, auto dim) { return (-x).softmax(dim); }).real_only();
  c.along_all("sort", [](const auto& x, auto dim) {
     const auto [v, i] = x.sort(dim);
     return Tensors{v, i};
   }).double_only();
  c.along_all("sort descending", [](const auto& x, auto dim) {
     const auto [v, i] = x.sort(std::optional<bool>(true), dim, true);
     return Tensors{v, i};
   }).double_only();
  c.along("argsort", [](const auto& x, auto dim) { return x.argsort(dim, true); }).double_only();
  c.along_all("topk", [](const auto& x, auto dim) {
     const auto [v, i] = x.topk((x.size(dim) + 1) / 2, dim);
     return Tensors{v, i};
   }).double_only();
  c.along("renorm", [](const auto& x, auto dim) { return x.renorm(2, dim, 1.5); }).double_only();
  c.along("glu", [](const auto& x, auto dim) {
     return at::glu(at::cat({x, x * 2}, dim), dim);
   }).real_only();
  c.along("normalize", [](const auto& x, auto dim) {
     return F::normalize(x, F::NormalizeFuncOptions().dim(dim));
   }).real_only();
  c.along(
       "cumulative trapezoid",
       [](const auto& x, auto dim) { return at::cumulative_trapezoid(x, 0.5, dim); }, 2)
      .real_only();
  c.along(
       "trapezoid", [](const auto& x, auto dim) { return at::trapezoid(x, 0.5, dim); }, 2)
      .real_only();
}

}  // namespace tessera::test
