#pragma once
// What the collectives of a thread are for, so that ranks that make alike calls for different
// reasons (one reads a loss, another is in backward) do not take each other's data.
//
//   const auto origin = std::make_shared<const CallOrigin>("aten::mm of [4, 8], [8, 3]");  // once
//   const OriginScope scope(origin);
//   group.all_reduce(t);  // compared with what the other ranks' calls are for

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/base/pinned.h"

namespace tessera::detail {

/// Names what calls are made for, by a text that is the same on all ranks.
class CallOrigin {
 public:
  explicit CallOrigin(std::string text);
  const std::string& text() const { return text_; }
  std::uint64_t hash() const { return hash_; }

 private:
  std::string text_;
  std::uint64_t hash_;
};

/// While it lives, the collectives that this thread calls are made for `origin`, which ranks
/// compare. The innermost scope of a thread counts.
class OriginScope : Pinned {
 public:
  /// The calls are no operator's, whatever this thread is in: for calls that the library starts
  /// when it suits this rank.
  OriginScope();
  /// `origin` lives longer than the scope, and is not null.
  explicit OriginScope(const std::shared_ptr<const CallOrigin>& origin);
  ~OriginScope();

  /// Null where this thread's calls are no operator's.
  static const OriginScope* current();
  const std::shared_ptr<const CallOrigin>& origin() const { return *origin_; }

 private:
  const std::shared_ptr<const CallOrigin>* origin_ = nullptr;
  const OriginScope* outer_;
};

}  // namespace tessera::detail
