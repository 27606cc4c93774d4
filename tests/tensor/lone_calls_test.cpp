// An operator that one rank alone calls: what its collective meets on the other ranks is told on
// all of them, and never taken for its own.
//
//   test_tensor_lone_calls                                       ranks as threads
//   tessera run -n 2 -- test_tensor_lone_calls --processes=loss  a case, as one of the processes

#include "support.h"
#include "tessera/comm/job/manager.h"
#include "tessera/tensor/redistribution.h"

namespace tessera::test {
namespace {

at::Tensor rows(const DeviceMesh& mesh, bool grad = false) {
  const at::Tensor value = at::arange(15, at::kDouble).view({5, 3});
  return distribute_tensor(value, mesh, {Shard(0)}).detach().requires_grad_(grad);
}

// Expects a MismatchError that says all `words`.
void expect_told(const std::function<void()>& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was told";
  } catch (const MismatchError& e) {
    for (const std::string& word : words)
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << word << ": " << e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "no MismatchError, but " << e.what();
  }
}

using Case = std::function<void(const DeviceMesh&, bool alone)>;

// Prints the loss in the middle of a step.
void loss_in_a_step(const DeviceMesh& mesh, bool alone) {
  const at::Tensor x = rows(mesh),
                   w = distribute_tensor(at::full({3}, 0.5, at::kDouble), mesh, {Replicate()})
                           .detach()
                           .requires_grad_(true);
  expect_told(
      [&] {
        const at::Tensor loss = (x * w).square().mean();
        if (alone) loss.item<double>();
        loss.backward();
        whole(w.grad());
      },
      {"item()", "called"});
}

// A reduction of the program itself, of as many elements.
void loss_beside_a_metric(const DeviceMesh& mesh, bool alone) {
  const at::Tensor x = rows(mesh);
  expect_told(
      [&] {
        const at::Tensor loss = x.square().mean();
        if (alone) loss.item<double>();
        mesh.all().all_reduce(at::ones({}, at::kDouble), ReduceOp::sum, {.name = "hits"});
        if (!alone) loss.item<double>();
      },
      {"item()", "'hits'"});
}

void value_beside_another(const DeviceMesh& mesh, bool alone) {
  const at::Tensor x = rows(mesh), y = rows(mesh);
  expect_told([&] { redistribute(alone ? x : y.t(), {Replicate()}); },
              {"the redistribution of [5, 3]", "the redistribution of [3, 5]"});
}

const std::vector<std::pair<std::string, Case>>& cases() {
  static const std::vector<std::pair<std::string, Case>> all = {
      {"loss", loss_in_a_step},
      {"metric", loss_beside_a_metric},
      {"value", value_beside_another},
  };
  return all;
}

// What ranks do alike goes on, and so does what one rank may do alone.
void expect_sound(const DeviceMesh& mesh) {
  const at::Tensor x = rows(mesh);
  const at::Tensor all = full_tensor(x);
  for (int step = 1; step < 12; ++step) {
    const at::Tensor y = x * step;
    if (mesh.all().rank() == step % mesh.all().size()) {
      const at::Tensor kept = y.detach().t();
      EXPECT_EQ(to_local(y).size(1), 3);
      EXPECT_EQ(kept.size(0), 3);
    }
    const at::Tensor sum = redistribute(y.sum(), {Replicate()});
    if (mesh.all().rank() == 0) {
      EXPECT_EQ((sum * 2).item<double>(), 2 * 105.0 * step);
    }
    EXPECT_EQ(y.sum().item<double>(), 105.0 * step);
  }
  EXPECT_TRUE(full_tensor(x).equal(all));
}

// A rank that still makes the group when the others have ended it would be told there.
DeviceMesh mesh_of_all(DistributedManager& manager) {
  auto mesh = manager.mesh({{"x", manager.world_size()}});
  mesh.all().barrier();
  return mesh;
}

void on(const std::string& backend, int ranks,
        const std::function<void(DistributedManager&)>& body) {
  ManagerOptions options;
  options.backend = backend;
  options.timeout = std::chrono::seconds(20);
  run_threads(
      ranks,
      [&](DistributedManager& manager) {
        at::set_num_threads(1);
        body(manager);
      },
      options);
}

TEST(LoneCalls, AreToldOnEveryRank) {
  for (const std::string backend : {"threads", "shm"}) {
    for (const int ranks : {2, 3}) {
      for (const auto& [name, run] : cases()) {
        SCOPED_TRACE(concat(name, " over ", backend, ", ", ranks, " ranks"));
        for (const int lone : {0, ranks - 1})
          on(backend, ranks, [&, &run = run](DistributedManager& manager) {
            run(mesh_of_all(manager), manager.rank() == lone);
          });
      }
    }
  }
}

TEST(LoneCalls, AreToldByGlooAfterASecond) {
  on("gloo", 2, [](DistributedManager& manager) {
    loss_in_a_step(mesh_of_all(manager), manager.rank() == 0);
  });
}

TEST(LoneCalls, LeaveAGroupSoundWhereNoDataMoved) {
  on("threads", 3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    for (const auto& [name, run] : cases()) {
      SCOPED_TRACE(name);
      run(mesh, manager.rank() == 1);
      expect_sound(mesh);
    }
  });
}

TEST(LoneCalls, OfWhatNeedsNoOtherRankAreFree) {
  for (const std::string backend : {"threads", "shm"}) {
    on(backend, 3, [](DistributedManager& manager) { expect_sound(manager.mesh({{"x", 3}})); });
  }
}

std::string processes;

TEST(LoneCallsOfProcesses, AreTold) {
  if (processes.empty()) GTEST_SKIP() << "ranks are threads here";
  ManagerOptions options;
  options.timeout = std::chrono::seconds(20);
  auto manager = DistributedManager::initialize(options);
  const auto mesh = mesh_of_all(manager);
  for (const auto& [name, run] : cases()) {
    if (processes != name) continue;
    SCOPED_TRACE(name);
    run(mesh, manager.rank() == 0);
  }
  manager.shutdown();
}

}  // namespace
}  // namespace tessera::test

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  const std::string name = "--processes=";
  for (int i = 1; i < argc; ++i) {
    if (const std::string argument = argv[i]; argument.starts_with(name)) {
      tessera::test::processes = argument.substr(name.size());
      ::testing::GTEST_FLAG(filter) = "LoneCallsOfProcesses.*";
    }
  }
  return RUN_ALL_TESTS();
}
