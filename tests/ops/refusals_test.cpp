// What plain libtorch refuses is refused on every rank, also on those whose part has nothing to do,
// before anything is sent: the next collective works.

#include "support.h"
#include "tessera/base/error.h"

namespace tessera::test {

namespace {

using Call = std::function<void(const std::function<at::Tensor(at::Tensor)>& placed)>;

// `call` builds its arguments, and passes each through `placed`.
void refused(const char* what, const Call& call) {
  EXPECT_ANY_THROW(call([](at::Tensor t) { return t; })) << what << ": plain libtorch takes it";
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    const auto placed = [&](const at::Tensor& t) {
      const int d = static_cast<int>(t.dim()) - 1 - (t.dim() > 2);  // of a field: a spatial dim
      return distribute_tensor(t,
                               ShardSpec(mesh, t.sizes().vec(), {Shard(d)}, {{d, {t.size(d), 0}}}));
    };
    EXPECT_ANY_THROW(call(placed)) << what << " on rank " << manager.rank();
    const at::Tensor ones = at::ones({3}, at::kDouble);
    EXPECT_EQ(full_tensor(placed(ones)).sum().item<double>(), 3)
        << what << ": rank " << manager.rank() << " cannot go on";
  });
}

}  // namespace

TEST(Refusals, OfIndexing) {
  const at::Tensor two = at::arange(2, at::kLong);
  refused("put of three values at two indices",
          [&](auto placed) { placed(at::zeros({8})).put_(placed(two), placed(at::ones({3}))); });
  refused("put of doubles into floats", [&](auto placed) {
    placed(at::zeros({8})).put_(placed(two), placed(at::ones({2}, at::kDouble)));
  });
  refused("put at int32 indices", [&](auto placed) {
    placed(at::zeros({8})).put_(placed(two.to(at::kInt)), placed(at::ones({2})));
  });
  const at::Tensor mask = at::ones({8}, at::kBool);
  refused("masked_scatter of doubles", [&](auto placed) {
    placed(at::zeros({8})).masked_scatter_(placed(mask), placed(at::ones({8}, at::kDouble)));
  });
  refused("masked_scatter by bytes", [&](auto placed) {
    placed(at::zeros({8})).masked_scatter_(placed(mask.to(at::kByte)), placed(at::ones({8})));
  });
}

TEST(Refusals, OfFieldsCutInSpace) {
  for (const auto type : {at::kInt, at::kLong, at::kBool, at::kComplexDouble}) {
    refused("nearest", [&](auto placed) {
      at::upsample_nearest2d(placed(at::ones({1, 1, 4, 4}, type)), {8, 8});
    });
    refused("nearest by an odd ratio", [&](auto placed) {
      at::upsample_nearest2d(placed(at::ones({1, 1, 22, 3}, type)), {25, 3});
    });
  }
  refused("grid_sampler of floats by doubles", [&](auto placed) {
    at::grid_sampler(placed(at::ones({1, 1, 8, 8})), placed(at::zeros({1, 4, 4, 2}, at::kDouble)),
                     0, 0, false);
  });
}

}  // namespace tessera::test
