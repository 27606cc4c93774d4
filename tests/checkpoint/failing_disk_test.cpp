// Checkpoints on disks that fail: full, unreadable or damaged ones are told to all ranks, and
// nothing is lost or left behind.

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "saved_rows.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::Folder;
using ::tessera::testing::put;

namespace {

// As a full disk from the n-th write or sync on; -1: never.
class Full : public FileOperations {
 public:
  std::atomic<int> left{-1};
  void write(const File& file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    step(file.path);
    FileOperations::write(file, data, bytes, offset);
  }
  void sync(const File& file) override {
    step(file.path);
    FileOperations::sync(file);
  }
  void rename(const std::string& from, const std::string& to) override {
    step(from);
    FileOperations::rename(from, to);
  }

 private:
  void step(const std::string& path) {
    int now = left;
    while (now > 0 && !left.compare_exchange_weak(now, now - 1)) {
    }
    if (now == 0) throw FileError("'", path, "' cannot be written to: No space left on device");
  }
};

// On the rank that commits, once the manifest is at its place: its folder cannot be synced, or is
// synced and then cannot be read.
class Committed : public FileOperations {
 public:
  enum class Then : unsigned char { nothing, no_sync, no_folder };
  std::atomic<Then> then{Then::nothing};
  void rename(const std::string& from, const std::string& to) override {
    FileOperations::rename(from, to);
    moved_ = then != Then::nothing && to.ends_with(kManifestName);
  }
  void sync_folder(const std::string& path) override {
    const bool now = moved_.exchange(false);
    if (now && then == Then::no_sync)
      throw FileError("'", path, "' cannot be synced: Input/output error");
    FileOperations::sync_folder(path);
    if (!now) return;
    std::filesystem::rename(path, path + ".aside");
    std::filesystem::create_symlink(path, path);  // to itself
  }

 private:
  std::atomic<bool> moved_{false};
};

std::size_t open_files() {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++n;
  return n;
}

}  // namespace

TEST(Checkpoint, AFullDiskOnOneRankFailsTheSaveOnAllAndLeavesNothing) {
  for (const bool background : {false, true}) {
    for (int at = 0; at < 12; ++at) {
      const Folder folder;
      on_threads(2, [&](DistributedManager& manager) {
        const auto disk = std::make_shared<Full>();
        Checkpointer checkpoints(manager, folder.path(), {.operations = disk});
        checkpoints.save("good", rows_state(manager, 1));
        if (manager.rank() == at % 2) disk->left = at / 2;
        // The first rank writes four times, syncs and moves twice; the other less.
        std::string why;
        bool failed = false;
        try {
          if (background) {
            checkpoints.start_save("bad", rows_state(manager, 2));
            checkpoints.wait();
          } else {
            checkpoints.save("bad", rows_state(manager, 2));
          }
        } catch (const FileError& e) {
          failed = true;
          why = e.what();
          EXPECT_TRUE(contains(why, "No space left")) << why;
          EXPECT_TRUE(contains(why, folder.path())) << why;
        }
        disk->left = -1;
        const auto all = manager.world().all_gather_bytes(failed ? "failed" : "saved");
        EXPECT_EQ(all[0], all[1]) << "the ranks agree on whether it was saved";
        if (at == 0 || at == 1) {
          EXPECT_TRUE(failed);
        }
        EXPECT_EQ(checkpoints.latest(), failed ? "good" : "bad");
        EXPECT_EQ(loaded_value(manager, folder.path(), "good"), 1);
        EXPECT_EQ(std::filesystem::exists(folder / "bad"), !failed);
        manager.world().all_gather_bytes("");
        checkpoints.save("again", rows_state(manager, 3));
        EXPECT_EQ(loaded_value(manager, folder.path(), "again"), 3);
      });
    }
  }
}

TEST(Checkpoint, DamageIsFoundByTheRankThatReadsItAndReportedOnAll) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path());
    checkpoints.save("c", rows_state(manager, 1));
    const std::string file = folder / ("c/" + names_in(folder / "c")[2]);
    const std::string good = contents(file);
    manager.world().all_gather_bytes("");
    if (manager.rank() == 0) {
      std::string bad = good;
      bad[bad.size() - 3] = static_cast<char>(bad[bad.size() - 3] ^ 4);
      put(file, bad);
    }
    manager.world().all_gather_bytes("");
    for (const int dim : {0, 1}) {
      const auto mesh = manager.mesh({{"x", 3}});
      const at::Tensor t = distribute_tensor(at::zeros({8, 3}), mesh, {Shard(dim)});
      CheckpointState state;
      state.add("t", t);
      const CheckpointReader saved(manager.world(), folder.path(), "c");
      const std::string why = thrown<FileError>([&] { saved.load(state); });
      EXPECT_TRUE(contains(why, file)) << why;
      EXPECT_TRUE(contains(why, "'t'")) << why;
      EXPECT_EQ(to_local(t).sum().item<double>(), 0) << "nothing is half loaded";
      thrown<FileError>([&] { saved.verify(); });
    }
    manager.world().all_gather_bytes("");
    if (manager.rank() == 0) put(file, good);
    manager.world().all_gather_bytes("");
    EXPECT_EQ(loaded_value(manager, folder.path(), "c"), 1);
  });
}

TEST(Checkpoint, WhatFailsBehindTheManifestIsNoFailureOfTheSave) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto disk = std::make_shared<Committed>();
    Checkpointer checkpoints(manager, folder.path(), {.keep_last = 5, .operations = disk});
    if (manager.rank() == 0) disk->then = Committed::Then::no_folder;
    checkpoints.save("unread", rows_state(manager, 1));
    if (manager.rank() == 0) {
      EXPECT_FALSE(checkpoints.warnings().empty());
      std::filesystem::remove(folder / "unread");
      std::filesystem::rename(folder / "unread.aside", folder / "unread");
      disk->then = Committed::Then::no_sync;
    }
    manager.world().all_gather_bytes("");
    EXPECT_EQ(loaded_value(manager, folder.path(), "unread"), 1);
    const std::string why =
        thrown<FileError>([&] { checkpoints.save("unsynced", rows_state(manager, 2)); });
    EXPECT_TRUE(contains(why, "may undo it")) << why;
    EXPECT_EQ(checkpoints.latest(), "unsynced");
    EXPECT_EQ(loaded_value(manager, folder.path(), "unsynced"), 2);
  });
}

TEST(Checkpoint, ANewOneComesAfterThoseThatCannotBeRead) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer knows(manager, folder.path());
    for (const char* name : {"one", "two"}) knows.save(name, rows_state(manager, 1));
    const auto world = manager.world();
    const std::string manifest = folder / "two/manifest.json";
    if (manager.rank() == 0) {
      std::filesystem::rename(manifest, folder / "kept");
      std::filesystem::create_symlink(manifest, manifest);  // to itself
    }
    world.barrier();
    Checkpointer fresh(manager, folder.path());
    const std::string why = thrown<FileError>([&] { fresh.save("three", rows_state(manager, 3)); });
    EXPECT_TRUE(contains(why, manifest)) << why;
    EXPECT_FALSE(std::filesystem::exists(folder / "three"));
    world.barrier();
    knows.save("four", rows_state(manager, 4));
    world.barrier();
    if (manager.rank() == 0) {
      std::filesystem::remove(manifest);
      std::filesystem::rename(folder / "kept", manifest);
    }
    world.barrier();
    EXPECT_EQ(knows.names(), (std::vector<std::string>{"one", "two", "four"}));
  });
}

TEST(Checkpoint, AnExportThatFailsLeavesNoFileAndNoDescriptor) {
  const Folder folder;
  on_threads(1, [&](DistributedManager& manager) {
    Checkpointer(manager, folder / "many").save("c", rows_state(manager, 1));
    const CheckpointReader saved(manager.world(), folder / "many", "c");
    saved.verify();
    const std::size_t before = open_files();
    for (int at = 0; at < 4; ++at) {
      const auto disk = std::make_shared<Full>();
      disk->left = at;
      EXPECT_THROW(saved.export_file(folder / "one", disk), FileError) << at;
      EXPECT_EQ(open_files(), before) << at;
      EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"many"}) << at;
    }
    saved.export_file(folder / "one");
    EXPECT_EQ(open_files(), before);
  });
}

}  // namespace tessera::test
