#pragma once
// What the tests of operators on sharded fields share: cases and placements drawn at random,
// compared with plain libtorch; on ranks that are threads, and, as
//   tessera run -n 3 -- test_ops_fields --backend=gloo
// on ranks that are processes, a sample of the cases.

#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <set>

#include "support.h"
#include "tessera/tensor/policy.h"

namespace tessera::test {

using Shape = std::vector<std::int64_t>;
using Values = std::vector<at::Tensor>;

// Differentiable inputs, then constants.
using Function = std::function<Values(const Values&)>;

/// What the cases cover, for the table in docs/halo.md: with --table=FILE they are drawn and noted,
/// not computed.
class Coverage {
 public:
  static Coverage& instance() {
    static Coverage one;
    return one;
  }
  std::string file;  // empty: the cases are computed
  bool noting() const { return !file.empty(); }

  /// `names`: of each dim of the field.
  void note(const std::string& op, const ShardSpec& field, const std::vector<std::string>& names,
            bool twice, int rank) {
    if (rank != 0) return;  // the others draw the same
    Row& row = rows_[op];
    ++row.cases;
    row.ranks.insert(field.sharding().positions());
    row.twice |= twice;
    std::set<std::string> cut;
    int in_space = 0;
    for (int d = 0; d < field.dims(); ++d) {
      const DimSharding& dim = field.dim(d);
      if (dim.partition.parts() < 2 || dim.axes.empty()) continue;
      cut.insert(names[d]);
      in_space += names[d] == "space";
      int wide = 0;
      for (const int a : dim.axes) wide += field.sharding().mesh()[a] > 1;
      row.over_axes |= wide > 1;
      const Sizes sizes = dim.partition.sizes();
      row.empty |= std::ranges::find(sizes, 0) != sizes.end();
    }
    row.cut.insert(cut.begin(), cut.end());
    row.together |= cut.size() > 1 || in_space > 1;
  }
  void write() const {
    std::ofstream out(file);
    for (const auto& [op, row] : rows_) {
      std::string cut, ranks;
      for (const char* name : {"samples", "heads", "channels", "space"}) {
        if (row.cut.contains(name)) cut += concat(cut.empty() ? "" : ", ", name);
      }
      for (const int n : row.ranks) ranks += concat(ranks.empty() ? "" : ", ", n);
      out << concat("| ", op, " | ", cut, row.together ? ", together" : "",
                    row.over_axes ? "; a dim over two axes" : "", row.empty ? "; empty shards" : "",
                    " | ", row.twice ? "first, second" : "first", " | ", row.cases, " on ", ranks,
                    " ranks |\n");
    }
  }

 private:
  struct Row {
    int cases = 0;
    std::set<int> ranks;
    std::set<std::string> cut;
    bool twice = false, together = false, over_axes = false, empty = false;
  };
  std::map<std::string, Row> rows_;
};

struct Case {
  std::string op;
  int inner;  // spatial dims, the last ones
  std::string text;
  std::vector<Shape> shapes;  // of inputs: the field first
  Function function;          // its first result is differentiated
  std::vector<at::Tensor> constants = {};
  // in the field alone: <H x, y> = <x, H' y>
  bool linear = false;
  // its second derivative exists in libtorch too
  bool twice = false;
  // may move more than halos
  bool moves = false;
  // where other inputs lie; default: anywhere
  std::function<ShardSpec(Draw&, const ShardSpec& field, std::size_t input)> others = {};
};

// Mostly in space; over one or more axes a dim.
inline ShardSpec field_spec(Draw& draw, const DeviceMesh& mesh, const Shape& shape, int spatial) {
  std::vector<Placement> placements;
  std::map<int, int> parts;
  const int n = static_cast<int>(shape.size());
  for (const Axis& axis : mesh.mesh().axes()) {
    const int d = draw.chance(85) ? n - 1 - draw.below(spatial) : draw.below(n);
    if (draw.chance(8)) {
      placements.push_back(Partial());
      continue;
    }
    placements.push_back(Shard(d));
    parts[d] = (parts.contains(d) ? parts[d] : 1) * axis.size;
  }
  ShardSizes all;
  for (const auto& [d, n_parts] : parts) all[d] = draw.sizes(shape[d], n_parts);
  return ShardSpec(mesh, shape, placements, all);
}

/// Of the function's first result, weighted: all results, the gradients of the inputs, and, if the
/// case asks for them, second derivatives.
inline Values differentiate(const Case& c, Values inputs, std::uint64_t number) {
  const std::size_t n = c.shapes.size();
  Values all = c.function(inputs);
  seed(number);
  const at::Tensor weight = randn(all[0].sizes(), at::kDouble);
  const Values leaves(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(n));
  const at::Tensor loss = ((c.twice ? all[0].square() : all[0]) * weight).sum();
  const auto gradients = torch::autograd::grad({loss}, leaves, {}, c.twice, c.twice);
  for (const at::Tensor& g : gradients) all.push_back(g);
  if (c.twice) {
    at::Tensor again;
    for (const at::Tensor& g : gradients)
      again = again.defined() ? again + g.square().sum() : g.square().sum();
    for (const at::Tensor& g : torch::autograd::grad({again}, leaves)) all.push_back(g);
  }
  return all;
}

inline void compare(const Case& c, const DeviceMesh& mesh, DistributedManager& manager, Draw& draw,
                    std::uint64_t number, int spatial) {
  seed(number);
  Values values, plain, sharded;
  for (const Shape& s : c.shapes) values.push_back(randn(s, at::kDouble));
  const ShardSpec spec = field_spec(draw, mesh, c.shapes[0], spatial);
  if (Coverage::instance().noting()) {
    const int n = spec.dims();
    std::vector<std::string> names(n, "space");
    for (int d = 0; d < n - c.inner; ++d) names[d] = d + 1 < n - c.inner ? "samples" : "channels";
    return Coverage::instance().note(c.op, spec, names, c.twice, manager.rank());
  }
  std::string where = concat(c.op, " ", c.text, " on ", spec);
  for (std::size_t i = 0; i < values.size() + c.constants.size(); ++i) {
    const bool input = i < values.size();
    const at::Tensor value = input ? values[i] : c.constants[i - values.size()];
    const ShardSpec lies = i == 0     ? spec
                           : c.others ? c.others(draw, spec, i)
                                      : draw.spec(mesh, value.sizes().vec(), input);
    if (i > 0) where += concat("; ", lies);
    plain.push_back(input ? value.clone().requires_grad_(true) : value);
    sharded.push_back(leaf(value, lies, input));
  }
  const Values expected = differentiate(c, plain, number);
  set_policies(manager, {.redistribution = c.moves ? Policy::allow : Policy::error});
  try {
    const Values got = differentiate(c, sharded, number);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(is_sharded(got[i]));
      EXPECT_LT(difference(got[i], expected[i]), 1e-10) << "result " << i << " of " << where;
    }
    if (c.linear) {
      seed(number);
      const at::Tensor y = randn(got[0].sizes(), at::kDouble);
      const at::Tensor field = sharded[0].detach(), result = got[0].detach();
      Case once = c;
      once.twice = false;
      const at::Tensor back = c.twice ? differentiate(once, sharded, number).back() : got.back();
      const double there = whole((result * y).sum()).item<double>(),
                   here = whole((field * back).sum()).item<double>();
      const double scale = std::max(1.0, whole(result.abs().sum()).item<double>());
      EXPECT_LT(std::abs(there - here), 1e-11 * scale) << "<Hx, y> and <x, H'y> of " << where;
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    ADD_FAILURE() << std::string(e.what()).substr(0, 500) << ": " << where;
  }
}

inline int ranks_of(const std::vector<Axis>& axes) {
  int ranks = 1;
  for (const Axis& a : axes) ranks *= a.size;
  return ranks;
}

class Fields : public ::testing::TestWithParam<std::vector<Axis>> {
 protected:
  /// `moves`: the cases may move more than halos.
  void run(const std::function<Case(Draw&)>& make, int cases, bool moves = false) {
    const int ranks = ranks_of(GetParam());
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped(GetParam()));
      for (int n = 0; n < (process() ? std::max(cases / 20, 4) : cases); ++n) {
        const std::uint64_t number =
            6007ull * static_cast<std::uint64_t>(n) + static_cast<std::uint64_t>(ranks);
        Draw draw(number);
        Case c = make(draw);
        c.moves |= moves;
        compare(c, mesh, manager, draw, number,
                std::min<int>(3, static_cast<int>(c.shapes[0].size()) - 1));
        if (::testing::Test::HasFailure()) return;
      }
    });
  }
};

inline const auto kFieldMeshes =
    ::testing::Values(std::vector<Axis>{{"a", 1}}, std::vector<Axis>{{"a", 2}},
                      std::vector<Axis>{{"a", 3}}, std::vector<Axis>{{"a", 2}, {"b", 2}});

/// main() of these programs (program_cases.h); --table=FILE: of the table.
inline int run_fields(int argc, char** argv, const char* programs) {
  const std::string name = "--table=", last = argv[argc - 1];
  if (!last.starts_with(name)) return run_ranks(argc, argv, programs);
  Coverage::instance().file = last.substr(name.size());
  ::testing::GTEST_FLAG(filter) = "*/*";  // those that draw
  const int failed = run_ranks(argc - 1, argv, programs);
  Coverage::instance().write();
  return failed;
}

}  // namespace tessera::test
