#pragma once
// The command lines of the launcher's tests.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera::test {

using Words = std::vector<std::string>;

/// `tessera run` with the helper as program. A short grace and a time limit, unless the options
/// name them.
inline Words command(int ranks, const Words& options, const Words& words) {
  Words all{TESSERA_PROGRAM, "run", "-n", std::to_string(ranks)};
  auto put_default = [&](const std::string& name, const std::string& value) {
    if (std::ranges::find(options, name) == options.end()) all.insert(all.end(), {name, value});
  };
  put_default("--timeout", "100");
  put_default("--grace", "0.2");
  all.insert(all.end(), options.begin(), options.end());
  all.insert(all.end(), {"--", TESSERA_HELPER});
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

/// The words behind a shell's script, in which "$@" stands for them.
inline Words in_shell(const std::string& script, const Words& words) {
  Words all{"sh", "-c", script, "sh"};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

/// A folder that goes away again.
class Folder {
 public:
  Folder() {
    std::string name = ::testing::TempDir() + "tessera_launcher_XXXXXX";
    if (mkdtemp(name.data())) path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::test
