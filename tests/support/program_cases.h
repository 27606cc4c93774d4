#pragma once
// Several test programs in one executable: the name by which it was started says whose cases run.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::test {

/// Whether a name is one of GoogleTest's patterns, joined by ':': '*' any text, '?' any letter.
inline bool is_of(std::string_view patterns, std::string_view name) {
  const auto one = [](auto&& self, std::string_view p, std::string_view n) -> bool {
    if (p.empty()) return n.empty();
    if (p[0] == '*')
      return self(self, p.substr(1), n) || (!n.empty() && self(self, p, n.substr(1)));
    return !n.empty() && (p[0] == '?' || p[0] == n[0]) && self(self, p.substr(1), n.substr(1));
  };
  while (!patterns.empty()) {
    const std::size_t end = std::min(patterns.find(':'), patterns.size());
    if (one(one, patterns.substr(0, end), name)) return true;
    patterns.remove_prefix(std::min(end + 1, patterns.size()));
  }
  return false;
}

/// Leaves of the cases that --gtest_filter names those of the program that `started` names: of
/// "NAME=a.cpp,b.cpp NAME=c.cpp". By another name all run. After InitGoogleTest.
inline void keep_cases_of(std::string_view started, const std::string& programs) {
  struct Program {
    std::string name;
    std::vector<std::string> files;
  };
  std::vector<Program> all;
  std::istringstream words(programs);
  for (std::string word; words >> word;) {
    const std::size_t at = word.find('=');
    Program program{word.substr(0, at), {}};
    std::istringstream files(word.substr(at + 1));
    for (std::string file; std::getline(files, file, ',');) program.files.push_back("/" + file);
    all.push_back(std::move(program));
  }
  started.remove_prefix(started.rfind('/') + 1);
  const auto own = std::ranges::find(all, started, &Program::name);
  if (own == all.end()) return;

  const std::string given = ::testing::GTEST_FLAG(filter);
  const std::size_t minus = std::min(given.find('-'), given.size());
  const std::string asked = minus == 0 ? "*" : given.substr(0, minus);
  const std::string refused = given.substr(std::min(minus + 1, given.size()));
  const auto has = [](const Program& program, const char* file) {
    return std::ranges::any_of(program.files, [&](const std::string& end) {
      return std::string_view(file).ends_with(end);
    });
  };
  std::string kept;
  const auto& tests = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < tests.total_test_suite_count(); ++s) {
    const auto& suite = *tests.GetTestSuite(s);
    for (int i = 0; i < suite.total_test_count(); ++i) {
      const auto& info = *suite.GetTestInfo(i);
      const std::string name = std::string(suite.name()) + "." + info.name();
      if (std::ranges::none_of(all,
                               [&](const auto& program) { return has(program, info.file()); })) {
        std::fprintf(stderr, "%s of %s is of no program\n", name.c_str(), info.file());
        std::exit(2);
      }
      if (has(*own, info.file()) && is_of(asked, name) && !is_of(refused, name)) kept += name + ":";
    }
  }
  ::testing::GTEST_FLAG(filter) = kept.empty() ? "-*" : kept;
}

}  // namespace tessera::test
