#include "tessera/launch/detail/launch_reader.h"

#include <algorithm>
#include <climits>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera::detail {

LaunchReader::LaunchReader(const Environment& environment, const LaunchOverrides& overrides,
                           std::string family)
    : environment_(environment), overrides_(overrides) {
  launch_.launcher = std::move(family);
}

std::string LaunchReader::shown(const std::string& name) const {
  const auto value = environment_.get(name);
  return value ? concat(name, "='", *value, "'") : concat(name, " is not set");
}

void LaunchReader::require(const std::vector<std::string>& names) const {
  std::vector<std::string> missing;
  std::vector<std::string> set;
  for (const auto& name : names)
    (has(name) ? set : missing).push_back(has(name) ? shown(name) : name);
  if (missing.empty()) return;
  // Among them the variables that have been read already.
  for (const auto& [field, origin] : launch_.origin) {
    const std::string name = origin.substr(0, origin.find('='));
    if (has(name) && std::ranges::find(names, name) == names.end()) set.push_back(shown(name));
  }
  fail("the environment is incomplete: not set are ", list(missing), ", while set are ", list(set),
       ". Unset these too if this process was not started by that launcher, or give rank "
       "and world_size in code");
}

std::string LaunchReader::first_set(const std::vector<std::string>& names) const {
  for (const auto& name : names)
    if (has(name)) return name;
  return names.front();
}

std::string LaunchReader::text(const std::string& name) const {
  require({name});
  const std::string value = *environment_.get(name);
  if (value.empty()) fail(name, " is empty");
  return value;
}

unsigned long long LaunchReader::number(const std::string& name, unsigned long long limit) const {
  require({name});
  const auto value = parse_number(*environment_.get(name));
  if (!value || *value > limit) fail(shown(name), " is not a whole number from 0 to ", limit);
  return *value;
}

void LaunchReader::integer(int Launch::* field, const char* field_name, const std::string& name) {
  launch_.*field = static_cast<int>(number(name, INT_MAX));
  note(field_name, concat(name, "=", *environment_.get(name)));
}

void LaunchReader::master() {
  if (has("MASTER_ADDR")) {
    launch_.address = text("MASTER_ADDR");
    note("address", concat("MASTER_ADDR=", launch_.address));
  }
  if (has("MASTER_PORT")) {
    launch_.port = static_cast<int>(number("MASTER_PORT", 65535));
    if (launch_.port == 0) fail("MASTER_PORT='0' is no port to meet at; give 1 to 65535");
    note("port", concat("MASTER_PORT=", launch_.port));
  }
}

void LaunchReader::master_required() {
  const bool given = overrides_.address && overrides_.port;
  if (launch_.world_size > 1 && !given) require({"MASTER_ADDR", "MASTER_PORT"});
  master();
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

}  // namespace tessera::detail
