// Pointwise operators, copies and casts, foreach.

#include "cases.h"

namespace tessera::test {

namespace {

void add_unary(Cases& c) {
  c.unary("relu", [](const auto& x) { return x.relu(); }).real_only();
  c.unary("gelu", [](const auto& x) { return at::gelu(x); }).real_only();
  c.unary("gelu tanh", [](const auto& x) { return at::gelu(x, "tanh"); }).real_only();
  c.unary("tanh", [](const auto& x) { return x.tanh(); });
  c.unary("sigmoid", [](const auto& x) { return x.sigmoid(); });
  c.unary("silu", [](const auto& x) { return at::silu(x); }).real_only();
  c.unary("mish", [](const auto& x) { return at::mish(x); }).real_only();
  c.unary("exp", [](const auto& x) { return x.exp(); });
  c.unary("expm1", [](const auto& x) { return x.expm1(); });
  c.positive("log", [](const auto& x) { return x.log(); });
  c.positive("log2, log10, log1p", [](const auto& x) { return x.log2() + x.log10() * x.log1p(); });
  c.positive("sqrt", [](const auto& x) { return x.sqrt(); });
  c.positive("rsqrt", [](const auto& x) { return x.rsqrt(); });
  c.positive("reciprocal", [](const auto& x) { return x.reciprocal(); });
  c.unary("sin and cos", [](const auto& x) { return x.sin() * x.cos(); });
  c.unary("tan, sinh, cosh",
          [](const auto& x) { return (x * 0.3).tan() + (x * 0.3).sinh() * (x * 0.3).cosh(); });
  c.unary("atan, asinh", [](const auto& x) { return x.atan() * x.asinh(); });
  c.unary("erf, erfc", [](const auto& x) { return x.erf() - (x * 0.5).erfc(); }).real_only();
  c.unary("neg", [](const auto& x) { return -x; });
  c.unary("abs", [](const auto& x) { return x.abs(); });
  c.unary("sign", [](const auto& x) { return x.sign() * x; }).real_only();
  c.unary("square", [](const auto& x) { return x.square(); });
  c.unary("floor, ceil, round, trunc", [](const auto& x) {
     return x.floor() + x.ceil() * 2 + x.round() * 4 + x.trunc() * 8 + x;
   }).double_only();
  c.unary("frac", [](const auto& x) { return x.frac(); }).double_only();
  c.unary("add scalar", [](const auto& x) { return x + 1.5; });
  c.unary("mul scalar", [](const auto& x) { return x * 3; });
  c.unary("div scalar", [](const auto& x) { return x / 3; });
  c.unary("scalar minus", [](const auto& x) { return 2 - x; });
  c.unary("pow", [](const auto& x) { return x.pow(3); });
  c.positive("pow of a number", [](const auto& x) { return at::pow(2.0, x); });
  c.unary("clamp", [](const auto& x) { return x.clamp(-0.5, 0.5); }).real_only();
  c.unary("clamp_min", [](const auto& x) { return x.clamp_min(0.1); }).real_only();
  c.unary("leaky_relu", [](const auto& x) { return at::leaky_relu(x, 0.1); }).real_only();
  c.unary("softplus", [](const auto& x) { return at::softplus(x); }).real_only();
  c.unary("elu", [](const auto& x) { return at::elu(x); }).real_only().finite();
  c.unary("selu, celu", [](const auto& x) { return at::selu(x) + at::celu(x); })
      .real_only()
      .finite();
  c.unary("hardtanh", [](const auto& x) { return at::hardtanh(x); }).real_only();
  // Libtorch's vectors and its last few elements give NaN different derivatives; elu too.
  c.unary("hardswish", [](const auto& x) { return at::hardswish(x); }).real_only().ordinary();
  c.unary("hardsigmoid", [](const auto& x) { return at::hardsigmoid(x); }).real_only();
  c.unary("relu6", [](const auto& x) { return at::relu6(x); }).real_only();
  c.unary("logsigmoid", [](const auto& x) { return at::log_sigmoid(x); }).double_only();
  c.unary("softshrink, hardshrink",
          [](const auto& x) { return at::softshrink(x) * at::hardshrink(x); })
      .double_only()
      .finite();  // the gradient of NaN differs between libtorch's vector and scalar code
  c.unary("softsign, tanhshrink", [](const auto& x) {
     return x / (x.abs() + 1) + (x - x.tanh());
   }).real_only();
  c.unary("threshold", [](const auto& x) { return at::threshold(x, 0.1, 20); }).real_only();
  c.unary("nan_to_num", [](const auto& x) {
     return at::nan_to_num(x / 0.0 * 0.0 + x, 0.5);
   }).double_only();
  c.unary("isnan, isfinite",
          [](const auto& x) { return at::isnan(x).logical_or(at::isfinite(x)); });
  c.unary("logical_not", [](const auto& x) { return x.logical_not(); });
  c.positive("logit", [](const auto& x) { return at::logit(x * 0.5); }).double_only();
  c.positive("lgamma, digamma", [](const auto& x) {
     return x.lgamma() + x.digamma();
   }).double_only();
  c.positive("xlogy", [](const auto& x) { return at::xlogy(x, x + 1); }).real_only();
  c.unary("sinc", [](const auto& x) { return at::sinc(x); }).double_only();
  c.unary("real and imag",
          [](const auto& x) { return x.is_complex() ? at::real(x) * at::imag(x) : x * 2; });
  c.unary("conj", [](const auto& x) { return x.conj() * x; });
  c.unary("angle", [](const auto& x) { return x.angle(); }).double_only();
  c.unary("bitwise", [](const auto& x) {
     return x.to(at::kInt).bitwise_and(6).bitwise_or(1).bitwise_xor(3).bitwise_not();
   }).real_only();
}

void add_copies(Cases& c) {
  c.unary("clone", [](const auto& x) { return x.clone(); });
  c.unary("contiguous", [](const auto& x) { return x.contiguous() * 2; });
  c.unary("to float and back", [](const auto& x) {
     return x.to(at::kFloat).to(at::kDouble);
   }).double_only();
  c.unary("to integer", [](const auto& x) { return x.to(at::kLong); }).real_only();
  c.unary("to bool", [](const auto& x) { return x.to(at::kBool); });
  c.unary("detach", [](const auto& x) { return x.detach() * x; });
  c.unary("zeros_like", [](const auto& x) { return at::zeros_like(x) + x; });
  c.unary("ones_like", [](const auto& x) { return at::ones_like(x) * x; });
  c.unary("full_like", [](const auto& x) { return at::full_like(x, 3) * x; });
  c.unary("new_zeros", [](const auto& x) { return x.new_zeros(x.sizes()) + x; });
  c.unary("new_full of another shape",
          [](const auto& x) { return x.new_full({2, 3}, 1.5) * x.sum(); });
  c.custom("channels_last", [](Draw& d) {
    const Shape s{d.between(1, 3), d.between(1, 3), d.between(1, 4), d.between(1, 4)};
    return Instance{{random(s)}, [](const Tensors& t) {
                      return Tensors{t[0].contiguous(at::MemoryFormat::ChannelsLast).exp() * t[0]};
                    }};
  });
  c.custom("copy_", [](Draw& d) {
    const Shape s = shape(d);
    return Instance{{random(s), random(narrower(d, s))}, [](const Tensors& t) {
                      at::Tensor y = t[0] * 2;
                      y.copy_(t[1]);
                      return Tensors{y * t[0]};
                    }};
  });
}

void add_binary(Cases& c) {
  c.binary("add", [](const auto& a, const auto& b) { return a + b; });
  c.binary("sub with alpha", [](const auto& a, const auto& b) { return at::sub(a, b, 0.5); });
  c.binary("rsub", [](const auto& a, const auto& b) { return at::rsub(a, b, 2); }).any_strides();
  c.binary("mul", [](const auto& a, const auto& b) { return a * b; });
  // One tensor in both arguments, of which one may stay partial.
  c.unary("mul with itself", [](const auto& x) {
    const at::Tensor y = x * 2;
    return y * y;
  });
  c.binary("div", [](const auto& a, const auto& b) { return a / b; }, true);
  c.binary(
       "div floor", [](const auto& a, const auto& b) { return at::div(a * 8, b, "floor") + a * b; },
       true)
      .double_only();
  c.binary(
       "remainder, fmod",
       [](const auto& a, const auto& b) { return at::remainder(a * 3, b) + at::fmod(a * 3, b); },
       true)
      .double_only();
  c.binary("pow of two", [](const auto& a, const auto& b) { return a.pow(b); }, true);
  c.binary("maximum", [](const auto& a, const auto& b) { return at::maximum(a, b); }).double_only();
  c.binary("minimum, fmin, fmax", [](const auto& a, const auto& b) {
     return at::minimum(a, b) + at::fmin(a, b) * at::fmax(a, b);
   }).double_only();
  c.binary("atan2", [](const auto& a, const auto& b) { return at::atan2(a, b); }, true).real_only();
  c.binary(
       "hypot", [](const auto& a, const auto& b) { return at::hypot(a, b); }, true)
      .double_only();
  c.binary("logaddexp", [](const auto& a, const auto& b) {
     return at::logaddexp(a, b);
   }).double_only();
  c.binary("copysign", [](const auto& a, const auto& b) {
     return at::copysign(a, b);
   }).double_only();
  c.binary("addcmul", [](const auto& a, const auto& b) { return at::addcmul(a, a, b, 0.3); });
  c.binary("addcdiv", [](const auto& a, const auto& b) { return at::addcdiv(a, a, b, 0.3); }, true);
  c.binary("lerp", [](const auto& a, const auto& b) { return at::lerp(a, b, 0.3); });
  c.binary("lerp by a tensor", [](const auto& a, const auto& b) { return at::lerp(a, b, a); });
  c.binary("comparison", [](const auto& a, const auto& b) {
     return (a > b).to(at::kDouble) * a;
   }).double_only();
  c.binary("eq, ne", [](const auto& a, const auto& b) { return a.eq(b).logical_xor(a.ne(b * 1)); });
  c.binary("less", [](const auto& a, const auto& b) {
     return a.lt(b).logical_and(a.le(b)).logical_or(a.ge(b));
   }).real_only();
  c.binary("heaviside", [](const auto& a, const auto& b) {
     return at::heaviside(a.detach(), b.detach()) * a;
   }).double_only();
  c.binary("where", [](const auto& a, const auto& b) {
     return at::where(a > 0, a * 2, b);
   }).real_only();
  c.binary("where with a number", [](const auto& a, const auto& b) {
     return at::where(b > 0, a, 0.5);
   }).real_only();
  c.binary("masked_fill", [](const auto& a, const auto& b) {
     return (a + b).masked_fill(b > 0, 0.25);
   }).real_only();
  c.binary("masked_fill by a tensor", [](const auto& a, const auto& b) {
     return (a + b).masked_fill(b > 0, a.sum());
   }).real_only();
  c.binary("prelu", [](const auto& a, const auto&) {
     return at::prelu(a, at::full({1}, 0.2, a.options().dtype(a.scalar_type())));
   }).double_only();
  c.binary("complex", [](const auto& a, const auto& b) {
     return at::complex(a, b).abs().square();
   }).double_only();
  c.binary(
       "polar", [](const auto& a, const auto& b) { return at::polar(a, b) * 2; }, true)
      .double_only();
}

void add_in_place(Cases& c) {
  c.unary("in-place chain", [](const auto& x) {
    at::Tensor y = x * 1;
    y.mul_(2).add_(x).sub_(0.5);
    y.exp_();
    return y;
  });
  c.unary("in-place activations", [](const auto& x) {
     at::Tensor y = x * 2;
     y.relu_().sigmoid_().clamp_(0.2, 0.8);
     return y;
   }).real_only();
  c.binary("in-place arithmetic", [](const auto& a, const auto& b) {
    at::Tensor y = (a + b) * 1;
    y.mul_(b).add_(a, 0.5).addcmul_(a, b, 2.0).lerp_(y.detach() * 2, 0.25);
    return y;
  });
  c.unary("zero_ and fill_", [](const auto& x) {
    at::Tensor y = x * 2, z = x * 3;
    y.zero_();
    z.fill_(2.5);
    return y + z * x;
  });
}

// Lists of tensors, as optimizers give them.
void add_foreach(Cases& c) {
  const auto lists = [](Draw& d) {
    Tensors t;
    for (int i = 0; i < 3; ++i) t.push_back(positive(shape(d)));
    for (int i = 0; i < 3; ++i) t.push_back(positive(t[i].sizes().vec()));
    return t;
  };
  const auto foreach = [&](const char* name,
                           std::function<Tensors(const Tensors&, const Tensors&)> f) {
    c.custom(name, [=](Draw& d) {
       return Instance{lists(d), [=](const Tensors& t) {
                         return f({t.begin(), t.begin() + 3}, {t.begin() + 3, t.end()});
                       }};
     }).any_strides();
  };
  foreach ("foreach add",
           [](const Tensors& a, const Tensors& b) { return at::_foreach_add(a, b, 0.5); });
  foreach ("foreach mul",
           [](const Tensors& a, const Tensors& b) { return at::_foreach_mul(a, b); });
  foreach ("foreach mul scalar",
           [](const Tensors& a, const Tensors&) { return at::_foreach_mul(a, 3); });
  foreach ("foreach div",
           [](const Tensors& a, const Tensors& b) { return at::_foreach_div(a, b); });
  foreach ("foreach sqrt", [](const Tensors& a, const Tensors&) { return at::_foreach_sqrt(a); });
  foreach ("foreach addcdiv",
           [](const Tensors& a, const Tensors& b) { return at::_foreach_addcdiv(a, b, a, 0.5); });
  foreach ("foreach lerp",
           [](const Tensors& a, const Tensors& b) { return at::_foreach_lerp(a, b, 0.3); });
  foreach ("foreach norm",
           [](const Tensors& a, const Tensors&) { return at::_foreach_norm(a, 2); });
  foreach ("foreach in place", [](const Tensors& a, const Tensors& b) {
    Tensors y;
    for (const auto& t : a) y.push_back(t * 2);
    at::_foreach_add_(y, b, 0.5);
    at::_foreach_mul_(y, 0.5);
    return y;
  });
}

}  // namespace

void add_pointwise(Cases& c) {
  add_unary(c);
  add_copies(c);
  add_binary(c);
  add_in_place(c);
  add_foreach(c);
}

}  // namespace tessera::test
