#pragma once
// Rows of packed documents, drawn at random, and attention inside them by its definition.

#include <cmath>

#include "support.h"
#include "tessera/ops/attention/packed.h"

namespace tessera::test::packed_attention_test {

using Shape = std::vector<std::int64_t>;
using Values = std::vector<at::Tensor>;

struct Case {
  Shape q, k, v;
  DocumentLengths lengths;
  PackedAttentionOptions options;

  explicit Case(Draw& draw) {
    const std::int64_t rows = draw.between(1, 3), tokens = draw.between(1, 14),
                       groups = draw.between(1, 2), each = draw.chance(30) ? 2 : 1;
    options = {.causal = draw.chance(50), .grouped = each > 1};
    if (draw.chance(20)) options.scale = 0.7;
    q = {rows, groups * each, tokens, 3};
    k = {rows, groups, tokens, 3};
    v = {rows, groups, tokens, draw.between(1, 4)};
    for (std::int64_t r = draw.chance(50) ? rows : 1; r > 0; --r)
      lengths.push_back(drawn(draw, tokens));
    if (lengths.size() == 1 && draw.chance(20)) {
      for (Shape* s : {&q, &k, &v}) s->erase(s->begin());
    }
  }
  /// Often of 0 and 1, sometimes with padding after them, and sometimes none.
  static Shape drawn(Draw& draw, std::int64_t tokens) {
    Shape all;
    std::int64_t left = draw.chance(30) ? draw.below(static_cast<int>(tokens) + 1) : tokens;
    while (left > 0) {
      all.push_back(draw.chance(25) ? 0 : draw.chance(25) ? 1 : draw.between(1, int(left)));
      left -= all.back();
    }
    if (draw.chance(20)) all.push_back(0);
    return all;
  }
  std::string text() const {
    std::string t = concat("q ", list(q), " k ", list(k), " v ", list(v), " lengths");
    for (const auto& row : lengths) t += " " + list(row);
    return t + (options.causal ? " causal" : "");
  }
};

/// Which pairs of [tokens, tokens] attend.
inline at::Tensor seen(const Shape& lengths, std::int64_t tokens, bool causal) {
  at::Tensor all = at::zeros({tokens, tokens}, at::kBool);
  std::int64_t begin = 0;
  for (const std::int64_t n : lengths) {
    all.narrow(0, begin, n).narrow(1, begin, n).fill_(true);
    begin += n;
  }
  return causal ? all.tril() : all;
}

inline at::Tensor by_definition(const Values& t, const Case& c) {
  const std::int64_t tokens = t[0].size(-2), each = t[0].size(-3) / t[1].size(-3);
  Values masks;
  for (const auto& lengths : c.lengths) masks.push_back(seen(lengths, tokens, c.options.causal));
  at::Tensor mask = at::stack(masks);
  mask = t[0].dim() == 3 ? mask[0] : mask.unsqueeze(1);
  const auto heads = [&](const at::Tensor& x) { return x.repeat_interleave(each, -3); };
  const double scale = c.options.scale.value_or(1 / std::sqrt(static_cast<double>(t[0].size(-1))));
  // Finite, so that rows of padding have gradients: zeros.
  const at::Tensor scores =
      (t[0].matmul(heads(t[1]).transpose(-2, -1)) * scale).masked_fill(mask.logical_not(), -1e300);
  return at::matmul(scores.softmax(-1) * mask, heads(t[2]));
}

inline Values leaves_of(const Values& values) {
  Values all;
  for (const at::Tensor& t : values) all.push_back(t.detach().clone().requires_grad_(true));
  return all;
}

}  // namespace tessera::test::packed_attention_test
