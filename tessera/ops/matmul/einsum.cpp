// einsum and tensordot. Libtorch permutes and reshapes the factors into matrices, which a sharded
// dim that is merged behind another one does not survive: such products keep their dims apart.

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/einsum_native.h>
#include <ATen/ops/tensordot_native.h>

#include <cctype>
#include <string>

#include "tessera/ops/matmul/detail/contract.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/dispatch/internal/promote.h"

namespace tessera::detail::einsum_rules {
namespace {

using Indices = std::vector<std::int64_t>;

// A factor and the label of each of its dims.
struct Factor {
  at::Tensor t;
  Indices labels;
};

bool has(const Indices& labels, std::int64_t l) {
  return std::ranges::find(labels, l) != labels.end();
}

// Whether all factors may be multiplied by contract(): what is cast on the way is left to libtorch.
bool contractible(at::ArrayRef<at::Tensor> tensors) {
  bool sharded = false;
  for (const at::Tensor& t : tensors) {
    if (!t.defined() || t.scalar_type() != tensors[0].scalar_type()) return false;
    if (!at::isFloatingType(t.scalar_type()) && !at::isComplexType(t.scalar_type())) return false;
    const ShardMeta* meta = meta_of(t);
    if (!meta) continue;
    if (casts_parameters(*meta) ||
        at::autocast::is_autocast_enabled(
            meta->layout->device.is_meta() ? at::kCPU : meta->layout->device.type()))
      return false;
    sharded |= meta->spec().has_shard();
  }
  return sharded;
}

// Sums dims whose label occurs nowhere else, and drops dims of size 1 that are stretched to the
// other factor's.
void reduce_alone(Factor& f, const Factor& other, const Indices& out) {
  for (std::int64_t d = f.t.dim() - 1; d >= 0; --d) {
    const auto l = f.labels[d];
    const auto at = std::ranges::find(other.labels, l);
    const bool stretched = f.t.size(d) == 1 && at != other.labels.end() &&
                           other.t.size(at - other.labels.begin()) != 1;
    if (!stretched && (at != other.labels.end() || has(out, l))) continue;
    const ShardMeta* meta = meta_of(f.t);
    // Of a dim of size 1 that is sharded one rank has the values: a sum, whose summands stay.
    const bool held = meta && meta->spec().is_sharded(static_cast<int>(d));
    f.t = stretched && !held ? f.t.squeeze(d) : f.t.sum(d);
    f.labels.erase(f.labels.begin() + d);
  }
}

// Whether a sharded dim of `f` would be merged behind another one: dims of both factors and the
// result, of one and the result, and of both factors alone are merged with each other, in the order
// of `order`.
bool torn(const Factor& f, const Factor& other, const Indices& out, const Indices& order) {
  const ShardMeta* meta = meta_of(f.t);
  if (!meta) return false;
  std::set<int> begun;
  for (const auto l : order) {
    const auto at = std::ranges::find(f.labels, l);
    if (at == f.labels.end()) continue;
    const int d = static_cast<int>(at - f.labels.begin());
    if (f.t.size(d) == 1) continue;
    const int group = !has(other.labels, l) ? 0 : has(out, l) ? 1 : 2;
    if (!begun.insert(group).second && meta->spec().is_sharded(d)) return true;
  }
  return false;
}

// Whether one rank has all of a sharded dim: views make it a dim of size 1 that is sharded, which
// libtorch takes off.
bool on_one_rank(const at::Tensor& t) {
  const ShardMeta* meta = meta_of(t);
  for (int d = 0; meta && d < t.dim(); ++d) {
    if (!is_distributed(meta->spec(), d)) continue;
    const auto sizes = meta->spec().dim(d).partition.sizes();
    if (std::ranges::count_if(sizes, [](std::int64_t n) { return n > 0; }) < 2) return true;
  }
  return false;
}

// The product of two factors if libtorch's way would tear a shard.
std::optional<at::Tensor> product(Factor a, Factor b, const Indices& out, const Indices& order) {
  const bool on_one = on_one_rank(a.t) || on_one_rank(b.t);
  reduce_alone(a, b, out);
  reduce_alone(b, a, out);
  reduce_alone(a, b, out);  // beside what was stretched
  if (!on_one && !torn(a, b, out, order) && !torn(b, a, out, order)) return std::nullopt;
  // contract() has as many labels as there are letters, counted from 0.
  Indices used;
  const auto renumbered = [&](Indices labels) {
    for (auto& l : labels) {
      if (!has(used, l)) used.push_back(l);
      l = std::ranges::find(used, l) - used.begin();
    }
    return labels;
  };
  const Indices la = renumbered(a.labels), lb = renumbered(b.labels), lo = renumbered(out);
  if (used.size() > 26) return std::nullopt;
  return contract(a.t, b.t, la, lb, lo);
}

// Labels: 26 letters, 26 small ones, and the dims of the ellipsis, of which the last has the last.
constexpr std::int64_t kLetters = 52, kLabels = 84;

// "ij,jk->ik" without repeated letters in one term; else nullopt.
struct Equation {
  std::vector<Indices> terms;
  Indices out;
};

// The labels of a term, in which an ellipsis stands for `others` dims.
std::optional<Indices> labels_of(const std::string& term, std::int64_t others) {
  Indices labels;
  for (std::size_t i = 0; i < term.size(); ++i) {
    const auto c = static_cast<unsigned char>(term[i]);
    if (term.compare(i, 3, "...") == 0) {
      if (others < 0 || others > kLabels - kLetters) return std::nullopt;
      for (std::int64_t l = kLabels - others; l < kLabels; ++l) labels.push_back(l);
      others = -1;
      i += 2;
      continue;
    }
    if (std::isalpha(c) == 0) return std::nullopt;
    const std::int64_t l = std::isupper(c) != 0 ? c - 'A' : c - 'a' + 26;
    if (has(labels, l)) return std::nullopt;
    labels.push_back(l);
  }
  return labels;
}

std::optional<Equation> parsed(c10::string_view text, at::TensorList tensors) {
  std::vector<std::string> terms(1);
  std::optional<std::string> result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == ' ') continue;
    if (!result && c == ',') {
      terms.emplace_back();
    } else if (!result && c == '-' && text.substr(i, 2) == "->") {
      result.emplace();
      ++i;
    } else {
      (result ? *result : terms.back()) += c;
    }
  }
  // What libtorch makes of an ellipsis without a result, or among three, is left to it.
  const bool ellipsis = text.find("...") != c10::string_view::npos;
  if (terms.size() != tensors.size() || (ellipsis && (!result || terms.size() > 2)))
    return std::nullopt;
  Equation e;
  Indices extent(kLabels, 1), seen(kLabels, 0);
  std::int64_t most = 0;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const bool some = terms[i].find("...") != std::string::npos;
    const std::int64_t others =
        tensors[i].dim() - static_cast<std::int64_t>(terms[i].size()) + (some ? 3 : 0);
    const auto labels = labels_of(terms[i], others);
    if (!labels || static_cast<std::int64_t>(labels->size()) != tensors[i].dim())
      return std::nullopt;
    most = some ? std::max(most, others) : most;
    for (std::size_t d = 0; d < labels->size(); ++d) {
      const std::int64_t n = tensors[i].size(static_cast<std::int64_t>(d));
      std::int64_t& known = extent[(*labels)[d]];
      if (n != 1 && known != 1 && n != known) return std::nullopt;
      if (n != 1) known = n;
      ++seen[(*labels)[d]];
    }
    e.terms.push_back(*labels);
  }
  if (result) {
    const auto out = labels_of(*result, most);
    if (!out) return std::nullopt;
    e.out = *out;
  } else {
    for (std::int64_t l = 0; l < kLetters; ++l)
      if (seen[l] == 1) e.out.push_back(l);
  }
  for (const auto l : e.out)
    if (seen[l] == 0) return std::nullopt;
  return e;
}

// Factor by factor from the left, as libtorch does it.
at::Tensor einsum(c10::string_view equation, at::TensorList tensors, at::OptionalIntArrayRef path) {
  const auto e = tensors.size() < 2 || path || !contractible(tensors) ? std::nullopt
                                                                      : parsed(equation, tensors);
  if (!e) return at::native::einsum(equation, tensors, path);
  Factor left{tensors[0], e->terms[0]};
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    const Factor right{tensors[i], e->terms[i]};
    const bool last = i + 1 == tensors.size();
    // What is asked for, and what later factors share; then what is summed over, by the alphabet.
    std::set<std::int64_t> kept;
    for (std::size_t j = i + 1; j < tensors.size(); ++j)
      kept.insert(e->terms[j].begin(), e->terms[j].end());
    kept.insert(e->out.begin(), e->out.end());
    Indices out;
    for (const auto l : e->out)
      if (has(left.labels, l) || has(right.labels, l)) out.push_back(l);
    for (std::int64_t l = 0; l < kLetters && !last; ++l)
      if (kept.contains(l) && !has(out, l) && (has(left.labels, l) || has(right.labels, l)))
        out.push_back(l);
    Indices order = out;
    for (std::int64_t l = 0; l < kLabels; ++l)
      if (!has(out, l)) order.push_back(l);
    auto made = product(left, right, out, order);
    if (!made && tensors.size() == 2) return at::native::einsum(equation, tensors, path);
    left = {made ? *made
                 : at::native::einsum(equation_of(left.labels, right.labels, out),
                                      {left.t, right.t}, std::nullopt),
            out};
  }
  return left.t;
}

at::Tensor tensordot(const at::Tensor& a, const at::Tensor& b, at::IntArrayRef dims_a,
                     at::IntArrayRef dims_b) {
  const auto as_before = [&] { return at::native::tensordot(a, b, dims_a, dims_b); };
  if (dims_a.size() != dims_b.size() || !contractible({a, b})) return as_before();
  Factor f{a, Indices(a.dim(), -1)}, g{b, Indices(b.dim(), -1)};
  Indices summed, out;
  std::int64_t next = 0;
  for (std::size_t i = 0; i < dims_a.size(); ++i) {
    const auto da = dims_a[i] < 0 ? dims_a[i] + a.dim() : dims_a[i],
               db = dims_b[i] < 0 ? dims_b[i] + b.dim() : dims_b[i];
    if (da < 0 || da >= a.dim() || db < 0 || db >= b.dim() || f.labels[da] >= 0 ||
        g.labels[db] >= 0 || (a.size(da) != b.size(db) && a.size(da) != 1 && b.size(db) != 1))
      return as_before();
    f.labels[da] = g.labels[db] = next;
    summed.push_back(next++);
  }
  for (Indices* labels : {&f.labels, &g.labels}) {
    for (auto& l : *labels)
      if (l < 0) out.push_back(l = next++);
  }
  Indices order = out;
  order.insert(order.end(), summed.begin(), summed.end());
  const auto made = product(f, g, out, order);
  return made ? *made : as_before();
}

const AtStart registered([] {
  register_decomposition("einsum", einsum);
  register_decomposition("tensordot", tensordot);
});

}  // namespace
}  // namespace tessera::detail::einsum_rules
