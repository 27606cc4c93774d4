#pragma once
// LaunchReader: reads the variables of one launcher family; its errors name variables and values.

#include <functional>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/launch/launch.h"

namespace tessera::detail {

class LaunchReader {
 public:
  LaunchReader(const Environment& environment, const LaunchOverrides& overrides,
               std::string family);

  const Environment& environment() const { return environment_; }
  const LaunchOverrides& overrides() const { return overrides_; }
  Launch& launch() { return launch_; }

  bool has(const std::string& name) const { return environment_.has(name); }
  /// Throws ConfigurationError unless all `names` are set, and lists which are.
  void require(const std::vector<std::string>& names) const;
  /// The first of `names` that is set; the first one if none is.
  std::string first_set(const std::vector<std::string>& names) const;
  /// The value of a variable. Throws ConfigurationError unless it is set and not empty.
  std::string text(const std::string& name) const;
  unsigned long long number(const std::string& name, unsigned long long limit) const;
  /// Sets a field from a variable and records the variable as its origin.
  void integer(int Launch::* field, const char* field_name, const std::string& name);
  void note(const char* field_name, const std::string& origin) {
    launch_.origin[field_name] = origin;
  }
  /// "NAME='value'" or "NAME is not set".
  std::string shown(const std::string& name) const;
  /// Sets address and port from MASTER_ADDR and MASTER_PORT, each if it is set.
  void master();
  /// Does what master() does, but both are required if there are several ranks.
  void master_required();
  /// Throws ConfigurationError; `why` joined follows the launcher's name.
  template <class... Why>
  [[noreturn]] void fail(const Why&... why) const {
    throw ConfigurationError("launcher ", launch_.launcher, ": ", why...);
  }

 private:
  const Environment& environment_;
  const LaunchOverrides& overrides_;
  Launch launch_;
};

bool is_loopback(const std::string& address);

struct LauncherFamily {
  const char* name;
  std::function<bool(const Environment&)> present;
  /// LaunchReader::launch() is complete afterwards, but not yet validated.
  void (*read)(LaunchReader&);
};
/// All families in the order in which they are tried.
std::vector<LauncherFamily> launcher_families();

}  // namespace tessera::detail
