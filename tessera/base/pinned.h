#pragma once
// Pinned: a base of classes whose objects are neither copied nor moved.

namespace tessera {

class Pinned {
 public:
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 protected:
  Pinned() = default;
  ~Pinned() = default;
};

}  // namespace tessera
