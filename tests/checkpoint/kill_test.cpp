// A save that ends at any operation: killed, cut off from power, or told that the disk is full. The
// checkpoint before it stays loadable, and nothing is loaded that is not complete.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <set>

#include "object_store.h"
#include "storage_support.h"
#include "tessera/checkpoint/detail/folder.h"

namespace tessera {
namespace {

using testing::DrawnState;
using testing::Folder;
using testing::latest_checkpoint;

enum class Fault { kill, torn, power, full };

// Counts operations; at the n-th it kills the process (at once, in the middle of a write, or with
// everything lost that was not synced), or throws as for a full disk from then on.
class Faulty : public FileOperations {
 public:
  Faulty(int at, Fault fault) : left_(at), fault_(fault) {}

  File open(const std::string& path, bool existing) override {
    step(path);
    unsynced_[path] = 0;
    return FileOperations::open(path, existing);
  }
  void write(const File& file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    if (left_ == 0 && fault_ != Fault::kill) FileOperations::write(file, data, bytes / 2, offset);
    step(file.path);
    FileOperations::write(file, data, bytes, offset);
  }
  void sync(const File& file) override {
    step(file.path);
    FileOperations::sync(file);
    unsynced_.erase(file.path);
  }
  void close(File& file) override {
    step(file.path);
    FileOperations::close(file);
  }
  void rename(const std::string& from, const std::string& to) override {
    step(from);
    FileOperations::rename(from, to);
    if (unsynced_.erase(from)) unsynced_[to] = 0;
    moved_.emplace_back(from, to);
  }
  bool remove(const std::string& path) override {
    step(path);
    return FileOperations::remove(path);
  }
  bool make_folder(const std::string& path) override {
    step(path);
    return FileOperations::make_folder(path);
  }
  void sync_folder(const std::string& path) override {
    step(path);
    FileOperations::sync_folder(path);
    std::erase_if(moved_, [&](const auto& m) { return folder_of(m.second) == path; });
  }

 private:
  void step(const std::string& path) {
    if (left_-- > 0) return;
    if (fault_ == Fault::full) {
      throw FileError("'", path, "' cannot be written to: No space left on device");
    }
    if (fault_ == Fault::power) {
      // The disk never saw what was not synced, and may have seen the names in any order.
      for (const auto& [file, size] : unsynced_)
        if (std::filesystem::exists(file)) std::filesystem::resize_file(file, size);
      if (left_ % 2 == 0)
        for (const auto& [from, to] : moved_)
          if (std::filesystem::exists(to)) std::filesystem::rename(to, from);
    }
    ::_exit(77);
  }
  int left_;
  Fault fault_;
  std::map<std::string, std::uint64_t> unsynced_;
  std::vector<std::pair<std::string, std::string>> moved_;
};

// What is there after the fault is the old checkpoint, or the new one in full; says which.
std::string survivor(const std::shared_ptr<CheckpointIO>& io, const DrawnState& old,
                     const DrawnState& fresh, const std::string& old_name,
                     const std::string& new_name) {
  std::vector<std::string> problems;
  const auto latest = latest_checkpoint(*io, &problems);
  if (!problems.empty()) return problems[0];
  if (!latest) return "nothing can be loaded";
  std::string which;
  for (const auto& [name, state] : {std::pair(old_name, &old), std::pair(new_name, &fresh)}) {
    if (name != *latest) continue;
    try {
      testing::expect_drawn(*state, io, name);
      which = state == &old ? "old" : "new";
      break;
    } catch (const std::exception& e) {
      which += e.what();
    }
  }
  return which;
}

void try_every_operation(Fault fault, bool same_name) {
  std::mt19937 engine(6);
  const DrawnState old = testing::draw_state(engine, 2, 3),
                   fresh = testing::draw_state(engine, 3, 4);
  const std::string name = same_name ? "a" : "b";
  std::set<std::string> seen;
  int operations = 0;
  for (int at = 0;; ++at) {
    ASSERT_LT(at, 300);
    const Folder folder;
    testing::save_drawn(old, folder.path(), "a", 1, FileOperations::system());
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 0;
      try {
        testing::save_drawn(fresh, folder.path(), name, 2, std::make_shared<Faulty>(at, fault));
      } catch (const FileError&) {
        code = 77;
      }
      ::_exit(code);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    const std::string left = survivor(local_folder(folder.path()), old, fresh, "a", name);
    ASSERT_TRUE(left == "old" || left == "new") << "operation " << at << ": " << left;
    seen.insert(left);
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 0) {
      ASSERT_EQ(left, "new");
      operations = at;
      break;
    }
    ASSERT_EQ(WEXITSTATUS(status), 77);
    // The next save, by whoever, cleans up and succeeds.
    const auto system = FileOperations::system();
    remove_incomplete(*local_folder(folder.path(), system));
    testing::save_drawn(fresh, folder.path(), name, 3, system);
    ASSERT_EQ(survivor(local_folder(folder.path()), old, fresh, "a", name), "new");
    ASSERT_EQ(names_in(folder / name).size(), read_manifest(folder.path(), name).files.size() + 1);
  }
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_GT(operations, 20) << "three shard files and a manifest";
}

TEST(Kill, AtEveryOperation) { try_every_operation(Fault::kill, false); }
TEST(Kill, AtEveryOperationInTheMiddleOfAWrite) { try_every_operation(Fault::torn, false); }
TEST(Kill, PowerLostAtEveryOperation) { try_every_operation(Fault::power, false); }
TEST(Kill, DiskFullAtEveryOperation) { try_every_operation(Fault::full, false); }
TEST(Kill, AtEveryOperationOverACheckpointOfTheSameName) {
  for (const Fault fault : {Fault::kill, Fault::torn, Fault::power, Fault::full})
    try_every_operation(fault, true);
}

// What the first rank of a job does in a save, and the writing of all ranks.
void save_as_job(const DrawnState& state, const std::shared_ptr<CheckpointIO>& io,
                 const std::string& name) {
  detail::CheckpointFolder folder(io, {.keep_last = 1});
  const detail::WriteHold hold = folder.hold_for_save();
  testing::save_drawn(state, io, name, 1, false, [&] {
    const std::uint64_t sequence = folder.next_sequence(hold);
    folder.confirm(hold);
    return sequence;
  });
  folder.retain();
}

// Killed with half of a call sent, and once it has been done.
TEST(Kill, AtEveryCallOfAStore) {
  using testing::HttpIO;
  std::mt19937 engine(9);
  const DrawnState old = testing::draw_state(engine, 2, 3),
                   fresh = testing::draw_state(engine, 3, 4);
  for (const std::string name : {"a", "b"}) {
    std::set<std::string> seen;
    bool killed = true;
    int calls = 0;
    for (; killed; ++calls) {
      ASSERT_LT(calls, 100);
      for (const auto fault : {testing::Fault::dies_within, testing::Fault::dies_after}) {
        const testing::ObjectStore store;
        const auto io = std::make_shared<HttpIO>(store.port());
        save_as_job(old, io, "a");
        const pid_t child = ::fork();
        if (child == 0) {
          io->fail_at(calls, fault);
          save_as_job(fresh, io, name);
          ::_exit(0);
        }
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        killed = WIFSIGNALED(status);
        const std::string left = survivor(io, old, fresh, "a", name);
        ASSERT_TRUE(left == "new" || (killed && left == "old")) << "call " << calls << ": " << left;
        seen.insert(left);
        save_as_job(fresh, io, name);
        ASSERT_EQ(survivor(io, old, fresh, "a", name), "new");
      }
    }
    EXPECT_EQ(seen.size(), 2u);
    EXPECT_GT(calls, 20) << "three shard files, a manifest, and what is read before";
  }
}

TEST(Kill, WhileOneIsRemoved) {
  std::mt19937 engine(7);
  const DrawnState state = testing::draw_state(engine, 3, 3);
  for (int at = 0;; ++at) {
    ASSERT_LT(at, 100);
    const Folder folder;
    testing::save_drawn(state, folder.path(), "a", 1, FileOperations::system());
    testing::save_drawn(state, folder.path(), "b", 2, FileOperations::system());
    const pid_t child = ::fork();
    if (child == 0) {
      const auto operations = std::make_shared<Faulty>(at, Fault::kill);
      remove_checkpoint(*local_folder(folder.path(), operations), "a");
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    std::vector<DamagedCheckpoint> damaged;
    const auto all = list_checkpoints(folder.path(), &damaged);
    EXPECT_TRUE(damaged.empty()) << "half-removed is none: " << damaged[0].damage;
    for (const auto& one : all) testing::expect_drawn(state, folder.path(), one.name);
    ASSERT_GE(all.size(), 1u);
    if (WEXITSTATUS(status) == 0) break;
  }
}

TEST(Kill, ReadOnlyFolder) {
  if (::geteuid() == 0) GTEST_SKIP() << "root writes everywhere";
  std::mt19937 engine(8);
  const Folder folder;
  const DrawnState state = testing::draw_state(engine, 2, 2);
  testing::save_drawn(state, folder.path(), "a", 1, FileOperations::system());
  std::filesystem::permissions(
      folder.path(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_THROW(testing::save_drawn(state, folder.path(), "b", 2, FileOperations::system()),
               FileError);
  testing::expect_drawn(state, folder.path(), "a");
  std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_all);
}

}  // namespace
}  // namespace tessera
