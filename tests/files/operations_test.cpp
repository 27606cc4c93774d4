#include "tessera/files/operations.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>

#include "../support/folder.h"

namespace tessera {
namespace {

using testing::Folder;

TEST(AtomicFile, IsAtItsPlaceCompleteOrNotAtAll) {
  const Folder folder;
  const std::string path = folder / "x";
  {
    AtomicFile file(path);
    file.write("one");
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(names_in(folder.path()).empty()) << "what was not committed is removed";
  AtomicFile first(path), second(path);
  first.write("first");
  second.write("sec");
  second.write("ond");
  first.commit();
  EXPECT_EQ(testing::contents(path), "first");
  second.commit();
  EXPECT_EQ(testing::contents(path), "second");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"x"});
}

TEST(AtomicFile, ErrorsNameTheFile) {
  const Folder folder;
  EXPECT_NE(testing::thrown<FileError>([&] {
              AtomicFile(folder / "absent/x");
            }).find(folder / "absent/x"),
            std::string::npos);
  std::filesystem::create_directory(folder / "taken");
  testing::put(folder / "taken/file", "");
  AtomicFile file(folder / "taken");
  EXPECT_NE(testing::thrown<FileError>([&] { file.commit(); }).find("taken"), std::string::npos);
  if (std::filesystem::exists("/dev/full")) {
    FileOperations operations;
    auto full = operations.open("/dev/full", true);
    EXPECT_NE(
        testing::thrown<FileError>([&] { operations.write(full, "x", 1, 0); }).find("/dev/full"),
        std::string::npos);
    operations.close(full);
  }
}

TEST(FileLock, IsHeldByOneAndDiesWithItsProcess) {
  const Folder folder;
  const auto operations = FileOperations::system();
  auto first = operations->lock(folder / "x");
  ASSERT_TRUE(first);
  EXPECT_FALSE(operations->lock(folder / "x"));
  auto copy = first;
  first.reset();
  EXPECT_FALSE(operations->lock(folder / "x"));
  EXPECT_NE(
      testing::thrown<FileError>([&] { operations->lock(folder / "absent/x"); }).find("absent/x"),
      std::string::npos);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    // What the child inherited does not let go of it.
    copy.reset();
    const auto mine = operations->lock(folder / "y");
    const char state = !operations->lock(folder / "x") && mine ? 'h' : 'n';
    if (::write(ends[1], &state, 1) == 1)
      for (;;) ::pause();
  }
  char state = 0;
  ASSERT_EQ(::read(ends[0], &state, 1), 1);
  EXPECT_EQ(state, 'h');
  EXPECT_FALSE(operations->lock(folder / "y"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(operations->lock(folder / "y"));
  for (const int end : ends) ::close(end);
}

// Ends the process in the n-th operation, before it or in the middle of a write.
class Killing : public FileOperations {
 public:
  Killing(int at, bool torn) : left_(at), torn_(torn) {}
  File open(const std::string& path, bool existing) override {
    step();
    return FileOperations::open(path, existing);
  }
  void write(const File& file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    if (left_ == 0 && torn_) FileOperations::write(file, data, bytes / 2, offset);
    step();
    FileOperations::write(file, data, bytes, offset);
  }
  void sync(const File& file) override {
    step();
    FileOperations::sync(file);
  }
  void close(File& file) override {
    step();
    FileOperations::close(file);
  }
  void rename(const std::string& from, const std::string& to) override {
    step();
    FileOperations::rename(from, to);
  }
  void sync_folder(const std::string& path) override {
    step();
    FileOperations::sync_folder(path);
  }
  int left() const { return left_; }

 private:
  void step() {
    if (left_-- == 0) ::_exit(77);
  }
  int left_;
  bool torn_;
};

TEST(AtomicFile, KilledAtAnyOperationLeavesTheOldOrTheNew) {
  std::set<std::string> seen;
  for (const bool torn : {false, true}) {
    for (int at = 0;; ++at) {
      const Folder folder;
      const std::string path = folder / "x";
      testing::put(path, "old");
      const pid_t child = ::fork();
      if (child == 0) {
        {
          AtomicFile file(path, std::make_shared<Killing>(at, torn));
          file.write("new ");
          file.write("contents");
          file.commit();
        }
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      const std::string left = testing::contents(path);
      ASSERT_TRUE(left == "old" || left == "new contents") << left;
      seen.insert(left);
      ASSERT_TRUE(WIFEXITED(status));
      if (WEXITSTATUS(status) == 0) break;
      ASSERT_EQ(WEXITSTATUS(status), 77);
      ASSERT_LT(at, 50);
    }
  }
  EXPECT_EQ(seen.size(), 2u);
}

TEST(Nonce, NeverTheSameTwice) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(seen.insert(make_nonce()).second);
}

}  // namespace
}  // namespace tessera
