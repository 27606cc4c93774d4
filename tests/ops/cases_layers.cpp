// Layers and losses.

#include "cases.h"

namespace tessera::test {

void add_layers(Cases& c) {
  c.custom("layer_norm", [](Draw& d) {
     const int a = d.between(0, 5), b = d.between(1, 4), n = d.between(2, 6);
     const bool two = d.chance(30);
     const Shape s = two ? Shape{b, n} : Shape{n};
     return Instance{{random({a, b, n}), random(s), random(s)}, [=](const Tensors& t) {
                       return Tensors{at::layer_norm(t[0], s, t[1], t[2])};
                     }};
   }).real_only();
  c.custom("layer_norm without weights", [](Draw& d) {
     const int n = d.between(2, 6);
     return Instance{{random({d.between(1, 5), n})},
                     [=](const Tensors& t) { return Tensors{at::layer_norm(t[0], {n})}; }};
   }).real_only();
  c.custom("rms_norm", [](Draw& d) {
     const int n = d.between(2, 6);
     return Instance{
         {random({d.between(1, 5), d.between(1, 3), n}), random({n})},
         [=](const Tensors& t) { return Tensors{at::rms_norm(t[0], {n}, t[1], 1e-6)}; }};
   }).real_only();
  c.custom("group_norm",
           [](Draw& d) {
             const int n = d.between(1, 5);
             Shape s{n, 4};
             for (int i = d.between(0, 2); i > 0; --i) s.push_back(d.between(2, 4));
             return Instance{{random(s), random({4}), random({4})}, [](const Tensors& t) {
                               return Tensors{at::group_norm(t[0], 2, t[1], t[2])};
                             }};
           })
      .real_only()
      .any_strides();
  c.custom("instance_norm", [](Draw& d) {
     const int n = d.between(1, 5), k = d.between(1, 4);
     return Instance{
         {random({n, k, d.between(2, 4), d.between(2, 4)}), random({k}), random({k})},
         [](const Tensors& t) {
           return Tensors{at::instance_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false)};
         }};
   }).double_only();
  c.custom("instance_norm with running statistics", [](Draw& d) {
     const int n = d.between(1, 5), k = d.between(1, 4);
     const bool training = d.chance(60);
     return Instance{
         {random({n, k, d.between(2, 4)}), random({k}), random({k}), random({k}), positive({k})},
         [=](const Tensors& t) {
           const at::Tensor mean = t[3].detach() + 0.5, var = t[4].detach().square() + 0.5;
           const at::Tensor y =
               at::instance_norm(t[0], t[1], t[2], mean, var, training, 0.2, 1e-5, false);
           return Tensors{y, mean, var};
         }};
   }).double_only();
  // libtorch's own backward takes the weight for contiguous, and reads what lies between its
  // elements; of an input that is channels last and a gradient that is not, its gradient is wrong.
  c.custom("batch_norm", [](Draw& d) {
     const int n = d.between(2, 5), k = d.between(1, 4), s = d.between(1, 4);
     const bool flat = d.chance(30);
     return Instance{{random(flat ? Shape{n, k} : Shape{n, k, s, 2}), random({k}), random({k})},
                     [](const Tensors& t) {
                       return Tensors{at::batch_norm(t[0].contiguous(), t[1].contiguous(), t[2], {},
                                                     {}, true, 0.1, 1e-5, false)};
                     }};
   }).double_only();
  // What is written to the statistics is compared on every rank.
  c.custom("batch_norm with running statistics", [](Draw& d) {
     const int n = d.between(2, 5), k = d.between(1, 4), s = d.between(1, 4);
     const bool flat = d.chance(30), training = d.chance(70), affine = d.chance(70);
     const Tensors of_channels{random({k}), random({k}), random({k}), positive({k})};
     return Instance{{random(flat ? Shape{n, k} : Shape{n, k, s, 2}), of_channels[0],
                      of_channels[1], of_channels[2], of_channels[3]},
                     [=](const Tensors& t) {
                       const at::Tensor mean = t[3].detach() + 0.5,
                                        var = t[4].detach().square() + 0.5;
                       const at::Tensor y = at::batch_norm(
                           t[0].contiguous(), affine ? t[1].contiguous() : at::Tensor(),
                           affine ? t[2] : at::Tensor(), mean, var, training, 0.2, 1e-5, false);
                       return Tensors{y, mean, var};
                     }};
   }).double_only();
  c.custom("conv1d", [](Draw& d) {
     const int n = d.between(1, 4), i = d.between(1, 4), o = d.between(1, 4);
     return Instance{{random({n, i, 6}), random({o, i, 3}), random({o})},
                     [](const Tensors& t) { return Tensors{at::conv1d(t[0], t[1], t[2], 1, 1)}; }};
   }).double_only();
  c.custom("conv2d", [](Draw& d) {
     const int n = d.between(1, 4), i = d.between(1, 4), o = d.between(1, 4);
     return Instance{{random({n, i, 5, 4}), random({o, i, 3, 2}), random({o})},
                     [](const Tensors& t) { return Tensors{at::conv2d(t[0], t[1], t[2], 2, 1)}; }};
   }).double_only();
  c.custom("conv_transpose1d", [](Draw& d) {
     const int n = d.between(1, 4), i = d.between(1, 4), o = d.between(1, 4);
     return Instance{{random({n, i, 5}), random({i, o, 3}), random({o})}, [](const Tensors& t) {
                       return Tensors{at::conv_transpose1d(t[0], t[1], t[2], 2, 1)};
                     }};
   }).double_only();
  c.custom("depthwise conv", [](Draw& d) {
     const int n = d.between(1, 4);
     return Instance{{random({n, 4, 5, 4}), random({4, 1, 3, 3})}, [](const Tensors& t) {
                       return Tensors{at::conv2d(t[0], t[1], {}, 1, 1, 1, 4)};
                     }};
   }).double_only();
  c.custom("max_pool2d",
           [](Draw& d) {
             return Instance{{distinct({d.between(1, 4), d.between(1, 3), 6, 5})},
                             [](const Tensors& t) { return Tensors{at::max_pool2d(t[0], 2)}; }};
           })
      .double_only()
      .any_strides();
  c.custom("avg_pool2d",
           [](Draw& d) {
             return Instance{{random({d.between(1, 4), d.between(1, 3), 6, 5})},
                             [](const Tensors& t) { return Tensors{at::avg_pool2d(t[0], 2)}; }};
           })
      .double_only()
      .any_strides();
  c.custom("adaptive_avg_pool2d",
           [](Draw& d) {
             return Instance{
                 {random({d.between(1, 4), d.between(1, 3), 6, 5})},
                 [](const Tensors& t) { return Tensors{at::adaptive_avg_pool2d(t[0], {2, 3})}; }};
           })
      .double_only()
      .any_strides();
  c.custom("interpolate",
           [](Draw& d) {
             return Instance{{random({d.between(1, 4), d.between(1, 3), 3, 2})},
                             [](const Tensors& t) {
                               return Tensors{at::upsample_nearest2d(t[0], {6, 4}),
                                              at::upsample_bilinear2d(t[0], {5, 4}, false)};
                             }};
           })
      .double_only()
      .any_strides()
      .may_refuse();
  c.custom("attention",
           [](Draw& d) {
             const int b = d.between(1, 3), h = d.between(1, 4), s = d.between(1, 4),
                       e = 2 * d.between(1, 2);
             const bool causal = d.chance(50);
             return Instance{{random({b, h, s, e}), random({b, h, s, e}), random({b, h, s, e})},
                             [=](const Tensors& t) {
                               return Tensors{at::scaled_dot_product_attention(t[0], t[1], t[2], {},
                                                                               0.0, causal)};
                             }};
           })
      .double_only()
      .any_strides()
      .finite()       // libtorch's fused kernel gives zeros for some scores that are NaN
      .first_only();  // and has no second derivative
  c.custom("attention with a mask",
           [](Draw& d) {
             const int b = d.between(1, 3), h = d.between(1, 4), s = d.between(1, 4),
                       e = 2 * d.between(1, 2);
             return Instance{
                 {random({b, h, s, e}), random({b, h, s, e}), random({b, h, s, e}),
                  random({d.chance(50) ? b : 1, 1, s, s})},
                 [=](const Tensors& t) {
                   return Tensors{at::scaled_dot_product_attention(t[0], t[1], t[2], t[3])};
                 }};
           })
      .double_only()
      .any_strides()
      .finite()
      .first_only();
}

void add_losses(Cases& c) {
  for (const int reduction : {0, 1, 2}) {
    const std::string how = std::vector<std::string>{" none", " mean", " sum"}[reduction];
    const auto loss =
        [&](const char* name,
            std::function<at::Tensor(const at::Tensor&, const at::Tensor&, std::int64_t)> f) {
          c.custom(name + how,
                   [=](Draw& d) {
                     const Shape s = shape(d, 0, 3, 1);
                     return Instance{{random(s), random(s)}, [=](const Tensors& t) {
                                       return Tensors{f(t[0], t[1], reduction)};
                                     }};
                   })
              .real_only()
              .any_strides();
        };
    loss("mse_loss", [](const auto& a, const auto& b, auto r) { return at::mse_loss(a, b, r); });
    loss("smooth_l1_loss",
         [](const auto& a, const auto& b, auto r) { return at::smooth_l1_loss(a, b, r); });
    loss("huber_loss",
         [](const auto& a, const auto& b, auto r) { return at::huber_loss(a, b, r); });
    loss("l1_loss", [](const auto& a, const auto& b, auto r) { return at::l1_loss(a, b, r); });
    loss("bce with logits", [](const auto& a, const auto& b, auto r) {
      return at::binary_cross_entropy_with_logits(a, b.sigmoid(), {}, {}, r);
    });
    loss("bce", [](const auto& a, const auto& b, auto r) {
      return at::binary_cross_entropy(a.sigmoid(), b.sigmoid(), {}, r);
    });
    loss("kl_div",
         [](const auto& a, const auto& b, auto r) { return at::kl_div(a, b.sigmoid(), r); });
    loss("poisson_nll_loss", [](const auto& a, const auto& b, auto r) {
      return at::poisson_nll_loss(a, b.sigmoid(), true, false, 1e-8, r);
    });
    loss("hinge_embedding_loss", [](const auto& a, const auto& b, auto r) {
      return at::hinge_embedding_loss(a, b.sign(), 1.0, r);
    });
    loss("soft_margin_loss",
         [](const auto& a, const auto& b, auto r) { return at::soft_margin_loss(a, b.sign(), r); });
    loss("margin_ranking_loss", [](const auto& a, const auto& b, auto r) {
      return at::margin_ranking_loss(a, b, a.sign().detach(), 0.1, r);
    });
    c.custom("cosine_embedding_loss" + how, [=](Draw& d) {
       const int n = d.between(1, 5), k = d.between(1, 4);
       return Instance{
           {random({n, k}), random({n, k}), random({n})}, [=](const Tensors& t) {
             return Tensors{at::cosine_embedding_loss(t[0], t[1], t[2].sign(), 0.1, reduction)};
           }};
     }).double_only();
    c.custom("triplet_margin_loss" + how, [=](Draw& d) {
       const int n = d.between(1, 5), k = d.between(1, 4);
       return Instance{{random({n, k}), random({n, k}), random({n, k})}, [=](const Tensors& t) {
                         return Tensors{at::triplet_margin_loss(t[0], t[1], t[2], 1.0, 2, 1e-6,
                                                                false, reduction)};
                       }};
     }).double_only();
    c.custom("cross_entropy" + how, [=](Draw& d) {
       const int n = d.between(1, 6), k = d.between(2, 5);
       const bool pixels = d.chance(40), weighted = d.chance(40);
       const double smoothing = d.chance(30) ? 0.1 : 0.0;
       const Shape scores = pixels ? Shape{n, k, 2, 3} : Shape{n, k},
                   targets = pixels ? Shape{n, 2, 3} : Shape{n};
       at::Tensor target = randint(k, targets);
       if (d.chance(30)) target.view(-1)[0] = -100;
       const at::Tensor weight = positive({k});
       return Instance{
           {random(scores), target}, [=](const Tensors& t) {
             const at::Tensor w =
                 weighted ? weight.to(t[0].device(), t[0].scalar_type()) : at::Tensor();
             return Tensors{at::cross_entropy_loss(t[0], t[1], w, reduction, -100, smoothing)};
           }};
     }).real_only();
    c.custom("cross_entropy with probabilities" + how, [=](Draw& d) {
       const int n = d.between(1, 6), k = d.between(2, 5);
       return Instance{
           {random({n, k}), random({n, k})}, [=](const Tensors& t) {
             return Tensors{at::cross_entropy_loss(t[0], t[1].softmax(1), {}, reduction)};
           }};
     }).real_only();
    c.custom("nll_loss" + how, [=](Draw& d) {
       const int n = d.between(1, 6), k = d.between(2, 5);
       return Instance{{random({n, k}), randint(k, {n})}, [=](const Tensors& t) {
                         return Tensors{at::nll_loss(t[0], t[1], {}, reduction)};
                       }};
     }).real_only();
    c.custom("multi_margin_loss" + how,
             [=](Draw& d) {
               const int n = d.between(1, 6), k = d.between(2, 5);
               return Instance{
                   {random({n, k}), randint(k, {n})}, [=](const Tensors& t) {
                     return Tensors{at::multi_margin_loss(t[0], t[1], 1, 1, {}, reduction)};
                   }};
             })
        .double_only()
        .may_refuse();
  }
  c.custom("clip_grad_norm_", [](Draw& d) {
     const Shape a = shape(d, 0, 2, 1), b = shape(d, 0, 2, 1);
     return Instance{{random(a), random(b)}, [](const Tensors& t) {
                       // Of copies, whose gradients are set by hand.
                       Tensors p{t[0].detach() * 1, t[1].detach() * 1};
                       for (std::size_t i = 0; i < p.size(); ++i)
                         p[i].requires_grad_(true).mutable_grad() = t[i].detach() * 3;
                       torch::nn::utils::clip_grad_norm_(p, 0.7);
                       return Tensors{p[0].grad() * t[0], p[1].grad() * t[1]};
                     }};
   }).double_only();
  c.custom("clip_grad_value_",
           [](Draw& d) {
             return Instance{{random(shape(d, 0, 2, 1))}, [](const Tensors& t) {
                               at::Tensor p = t[0].detach() * 1;
                               p.requires_grad_(true).mutable_grad() = t[0].detach() * 3;
                               torch::nn::utils::clip_grad_value_(p, 0.7);
                               return Tensors{p.grad() * t[0]};
                             }};
           })
      .double_only()
      .no_partial();
}

// Compared with the same draw on a mesh of one rank.
void add_random(Cases& c) {
  c.unary("dropout", [](const auto& x) { return at::dropout(x, 0.4, true); }).draws_numbers();
  c.unary("rand_like", [](const auto& x) { return at::rand_like(x) * x; }).draws_numbers();
  c.unary("randn_like", [](const auto& x) { return at::randn_like(x) * x; }).draws_numbers();
  c.unary("bernoulli", [](const auto& x) {
     return at::bernoulli(x.sigmoid()) * x;
   }).draws_numbers();
  c.unary("uniform_ and normal_", [](const auto& x) {
     at::Tensor y = x * 1, z = x * 2;
     y.uniform_(-1, 2);
     z.normal_(1, 0.5);
     return y * x + z;
   }).draws_numbers();
  c.unary("exponential_ and the like",
          [](const auto& x) {
            at::Tensor y = x * 1;
            y.exponential_(1.5);
            return y * x;
          })
      .draws_numbers()
      .may_refuse();
  c.unary("randint_like", [](const auto& x) { return at::randint_like(x, 7) * x; })
      .draws_numbers()
      .may_refuse();
  c.unary(
       "feature_dropout", [](const auto& x) { return at::feature_dropout(x, 0.4, true); }, 3, 1)
      .draws_numbers()
      .may_refuse();
  c.unary(
       "multinomial",
       [](const auto& x) {
         const at::Tensor p = x.detach().flatten(0, -2).abs() + 0.1;
         return at::multinomial(p, 3, true).to(x.dtype()) * x.flatten(0, -2).select(-1, 0).mean();
       },
       2, 1)
      .draws_numbers()
      .ordinary();
  c.custom("normal of tensors",
           [](Draw& d) {
             const Shape s = shape(d);
             return Instance{{random(s), random(narrower(d, s))}, [](const Tensors& t) {
                               return Tensors{at::normal(t[0], t[1].abs()), at::normal(t[0], 0.5),
                                              at::normal(0.5, t[1].abs())};
                             }};
           })
      .draws_numbers()
      .ordinary();
  c.unary("rrelu", [](const auto& x) {
     return at::rrelu(x, 0.1, 0.4, true) + at::rrelu(x, 0.1, 0.4, false);
   }).draws_numbers();
  c.unary("alpha_dropout", [](const auto& x) { return at::alpha_dropout(x, 0.4, true); })
      .draws_numbers()
      .may_refuse();
}

}  // namespace tessera::test
