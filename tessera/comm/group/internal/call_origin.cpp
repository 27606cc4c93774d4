#include "tessera/comm/group/internal/call_origin.h"

#include <utility>

#include "tessera/base/hash.h"

namespace tessera::detail {
namespace {

const OriginScope*& innermost() {
  static thread_local const OriginScope* scope = nullptr;
  return scope;
}

}  // namespace

CallOrigin::CallOrigin(std::string text)
    : text_(std::move(text)), hash_(Hash().text(text_).value()) {}

OriginScope::OriginScope() : outer_(std::exchange(innermost(), this)) {}
OriginScope::OriginScope(const std::shared_ptr<const CallOrigin>& origin)
    : origin_(&origin), outer_(std::exchange(innermost(), this)) {}
OriginScope::~OriginScope() { innermost() = outer_; }

const OriginScope* OriginScope::current() {
  const OriginScope* scope = innermost();
  return scope && scope->origin_ ? scope : nullptr;
}

}  // namespace tessera::detail
