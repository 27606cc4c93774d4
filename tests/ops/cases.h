#pragma once
// Operators for the property test: each draws inputs and arguments, then gives the function to
// compare.

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "support.h"

namespace tessera::test {

namespace F = torch::nn::functional;
using Shape = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

struct Instance {
  /// Plain, floating-point ones float64: the test casts them, lays them out in memory and over
  /// ranks, and asks for their gradients.
  Tensors inputs;
  std::function<Tensors(const Tensors&)> function;
};

struct OperatorCase {
  std::string name;
  std::function<Instance(Draw&)> make;
  /// May not be refused.
  bool must = true;
  /// Also float, bfloat16, half and complex; else float64 alone.
  bool any_type = true;
  /// Also complex.
  bool complex = true;
  /// Compared with a mesh of one rank instead of plain tensors.
  bool random = false;
  /// Results lie in memory as plain libtorch's do.
  bool strides = true;
  /// Inputs may be partial.
  bool partial = true;

  OperatorCase& may_refuse() { return must = false, *this; }
  OperatorCase& double_only() { return any_type = false, *this; }
  OperatorCase& real_only() { return complex = false, *this; }
  OperatorCase& draws_numbers() { return random = true, any_type = false, *this; }
  /// Second derivatives too.
  bool second = true;

  /// Values that are hard too, where special ones are drawn.
  bool special = true;
  /// NaN and infinities among them. Not for what libtorch's own kernels do in several ways.
  bool not_finite = true;
  /// Equal values among them. Not where the gradient goes to any one of them.
  bool ties = true;

  /// The same calls on ranks whose inputs do and do not require gradients. Not where libtorch makes
  /// a view anew, for its graph, that had to be gathered.
  bool in_step = true;

  OperatorCase& views_anew() { return in_step = false, *this; }
  OperatorCase& ordinary() { return special = false, *this; }
  OperatorCase& finite() { return not_finite = false, *this; }
  /// Infinities and NaN are equal to each other too.
  OperatorCase& no_ties() { return ties = not_finite = false, *this; }
  OperatorCase& first_only() { return second = false, *this; }
  OperatorCase& no_partial() { return partial = false, *this; }
  OperatorCase& any_strides() { return strides = false, *this; }
};

class Cases {
 public:
  std::deque<OperatorCase> all;  // a deque: references to cases stay

  OperatorCase& custom(const std::string& name, std::function<Instance(Draw&)> make);
  /// One tensor of `least` to 3 dims, each of size `smallest` to 6.
  OperatorCase& unary(const std::string& name, std::function<at::Tensor(const at::Tensor&)> f,
                      int least = 0, int smallest = 0);
  /// The same with values in (0.5, 1.5).
  OperatorCase& positive(const std::string& name, std::function<at::Tensor(const at::Tensor&)> f,
                         int least = 0, int smallest = 0);
  /// Two tensors that broadcast, in either order.
  OperatorCase& binary(const std::string& name,
                       std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> f,
                       bool positive = false);
  /// A tensor and one of its dims, counted from either end.
  OperatorCase& along(const std::string& name,
                      std::function<at::Tensor(const at::Tensor&, std::int64_t)> f,
                      int smallest = 1);
  OperatorCase& along_all(const std::string& name,
                          std::function<Tensors(const at::Tensor&, std::int64_t)> f,
                          int smallest = 1);
  /// A tensor, some of its dims, and keepdim.
  OperatorCase& reduction(const std::string& name,
                          std::function<at::Tensor(const at::Tensor&, at::IntArrayRef, bool)> f,
                          int smallest = 1);
};

Shape shape(Draw& d, int low = 0, int high = 3, int smallest = 0);
at::Tensor random(const Shape& s);
at::Tensor positive(const Shape& s);
/// All values differ, by much: no ties after rounding, no kink nearby.
at::Tensor distinct(const Shape& s);
int dim_of(Draw& d, const at::Tensor& t);
std::vector<std::int64_t> some_dims(Draw& d, const at::Tensor& t);
/// A shape that broadcasts to `s`.
Shape narrower(Draw& d, const Shape& s);

void add_pointwise(Cases& c);
void add_reductions(Cases& c);
void add_scans(Cases& c);
void add_products(Cases& c);
void add_views(Cases& c);
void add_joins(Cases& c);
void add_indexing(Cases& c);
void add_layers(Cases& c);
void add_losses(Cases& c);
void add_writes(Cases& c);
void add_random(Cases& c);

const std::deque<OperatorCase>& operator_cases();

}  // namespace tessera::test
