#include "cases.h"

namespace tessera::test {

Shape shape(Draw& d, int low, int high, int smallest) {
  Shape s;
  for (int n = d.between(low, high); n > 0; --n) s.push_back(d.between(smallest, 6));
  return s;
}
at::Tensor random(const Shape& s) { return randn(s, at::kDouble); }
at::Tensor positive(const Shape& s) { return rand(s, at::kDouble) + 0.5; }
at::Tensor distinct(const Shape& s) {
  std::int64_t n = 1;
  for (const auto k : s) n *= k;
  return (at::randperm(n, generator(), at::TensorOptions(at::kDouble)) * 0.25 -
          0.125 * static_cast<double>(n))
             .reshape(s) +
         0.0625;
}
int dim_of(Draw& d, const at::Tensor& t) {
  return d.below(std::max<int>(static_cast<int>(t.dim()), 1));
}
std::vector<std::int64_t> some_dims(Draw& d, const at::Tensor& t) {
  std::vector<std::int64_t> dims;
  for (int i = 0; i < t.dim(); ++i) {
    if (d.chance(50)) dims.push_back(i);
  }
  if (dims.empty() && t.dim() > 0) dims.push_back(0);
  return dims;
}
Shape narrower(Draw& d, const Shape& s) {
  Shape t(s.begin() + d.below(static_cast<int>(s.size()) + 1), s.end());
  for (auto& n : t) n = d.chance(30) ? 1 : n;
  return t;
}

OperatorCase& Cases::custom(const std::string& name, std::function<Instance(Draw&)> make) {
  return all.emplace_back(OperatorCase{name, std::move(make)});
}
OperatorCase& Cases::unary(const std::string& name, std::function<at::Tensor(const at::Tensor&)> f,
                           int least, int smallest) {
  return custom(name, [=](Draw& d) {
    return Instance{{random(shape(d, least, 3, smallest))},
                    [=](const Tensors& t) { return Tensors{f(t[0])}; }};
  });
}
OperatorCase& Cases::positive(const std::string& name,
                              std::function<at::Tensor(const at::Tensor&)> f, int least,
                              int smallest) {
  return custom(name, [=](Draw& d) {
    return Instance{{test::positive(shape(d, least, 3, smallest))},
                    [=](const Tensors& t) { return Tensors{f(t[0])}; }};
  });
}
OperatorCase& Cases::binary(const std::string& name,
                            std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> f,
                            bool positive_only) {
  return custom(name, [=](Draw& d) {
    const Shape s = shape(d), other = narrower(d, s);
    const bool swapped = d.chance(30);
    const at::Tensor a = positive_only ? test::positive(s) : random(s),
                     b = positive_only ? test::positive(other) : random(other);
    return Instance{
        {a, b}, [=](const Tensors& t) { return Tensors{swapped ? f(t[1], t[0]) : f(t[0], t[1])}; }};
  });
}
OperatorCase& Cases::along(const std::string& name,
                           std::function<at::Tensor(const at::Tensor&, std::int64_t)> f,
                           int smallest) {
  return along_all(
      name, [=](const at::Tensor& t, std::int64_t dim) { return Tensors{f(t, dim)}; }, smallest);
}
OperatorCase& Cases::along_all(const std::string& name,
                               std::function<Tensors(const at::Tensor&, std::int64_t)> f,
                               int smallest) {
  return custom(name, [=](Draw& d) {
    const at::Tensor x = distinct(shape(d, 1, 3, smallest));
    const int dim = dim_of(d, x) - (d.chance(50) ? static_cast<int>(x.dim()) : 0);
    return Instance{{x}, [=](const Tensors& t) { return f(t[0], dim); }};
  });
}
OperatorCase& Cases::reduction(
    const std::string& name, std::function<at::Tensor(const at::Tensor&, at::IntArrayRef, bool)> f,
    int smallest) {
  return custom(name, [=](Draw& d) {
    const at::Tensor x = distinct(shape(d, 1, 3, smallest)) * 0.25;
    const auto dims = some_dims(d, x);
    const bool keep = d.chance(50);
    return Instance{{x}, [=](const Tensors& t) { return Tensors{f(t[0], dims, keep)}; }};
  });
}

const std::deque<OperatorCase>& operator_cases() {
  static const Cases cases = [] {
    Cases c;
    add_pointwise(c);
    add_reductions(c);
    add_scans(c);
    add_products(c);
    add_views(c);
    add_joins(c);
    add_indexing(c);
    add_layers(c);
    add_losses(c);
    add_writes(c);
    add_random(c);
    return c;
  }();
  return cases.all;
}

}  // namespace tessera::test
