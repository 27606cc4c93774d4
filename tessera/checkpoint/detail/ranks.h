#pragma once
// Ranks: what the ranks of a group do together, step by step, within one limit.
//
//   const Ranks ranks = ranks_of_file(mesh);
//   ranks.first("save", [&] { file.commit(); });   // an error of it is thrown on every rank

#include <algorithm>
#include <chrono>
#include <string>

#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/device_mesh.h"

namespace tessera::detail {

/// The functions of agree.h over one group, whose calls have these options.
struct Ranks {
  Group group;
  CallOptions call;

  template <class T = void, class... Kinds, class Body>
  auto all(const std::string& what, const Body& body) const {
    return agree::all<T, Kinds...>(group, what, body, call);
  }
  template <class T = void, class... Kinds, class Body>
  T first(const std::string& what, const Body& body) const {
    return agree::first<T, Kinds...>(group, what, body, call);
  }
  template <class Body>
  std::string all_same(const std::string& what, const Body& body) const {
    return agree::all_same(group, what, body, call);
  }
};

/// Those of a mesh, one of which reads or writes for all: that lasts longer than what groups
/// otherwise wait for.
inline Ranks ranks_of_file(const DeviceMesh& mesh) {
  const Group all = mesh.all();
  return {all, {std::max<std::chrono::milliseconds>(all.timeout(), std::chrono::hours(1)), "file"}};
}

}  // namespace tessera::detail
