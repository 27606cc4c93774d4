#include "tessera/data/detail/buffer_pool.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace tessera::detail {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::align_val_t alignment_of(std::size_t bytes) {
  return std::align_val_t{bytes >= kHugePage ? kHugePage : 64};
}

}  // namespace

struct BufferPool::Blocks {
  struct Free {
    std::size_t bytes = 0;
    void operator()(void* block) const { ::operator delete(block, alignment_of(bytes)); }
  };
  using Block = std::unique_ptr<void, Free>;

  explicit Blocks(std::size_t kept) : kept(kept) {}
  const std::size_t kept;
  std::mutex mutex;
  std::vector<std::pair<std::size_t, Block>> free;  // bytes, oldest first

  Block take(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    // The last one that was returned is most likely still in the cache.
    const auto found =
        std::find_if(free.rbegin(), free.rend(), [&](const auto& f) { return f.first == bytes; });
    if (found == free.rend()) return nullptr;
    Block block = std::move(found->second);
    free.erase(std::next(found).base());
    return block;
  }

  static Block allocate(std::size_t bytes) {
    Block block(::operator new(std::max<std::size_t>(bytes, 1), alignment_of(bytes)), Free{bytes});
#ifdef MADV_HUGEPAGE
    // Only advice: if the system does not follow it, the block works all the same.
    if (bytes >= kHugePage) ::madvise(block.get(), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
    return block;
  }

  void give_back(std::size_t bytes, Block block) {
    const std::lock_guard lock(mutex);
    free.emplace_back(bytes, std::move(block));
    if (free.size() > kept) free.erase(free.begin());
  }
};

BufferPool::BufferPool(std::size_t kept) : blocks_(std::make_shared<Blocks>(kept)) {}

at::Tensor BufferPool::empty(std::span<const std::int64_t> shape, at::ScalarType dtype) {
  std::size_t bytes = c10::elementSize(dtype);
  for (const std::int64_t n : shape) bytes *= static_cast<std::size_t>(n);
  Blocks::Block block = blocks_->take(bytes);
  if (!block) block = Blocks::allocate(bytes);
  void* data = block.get();
  auto release = [blocks = blocks_, bytes](void* memory) {
    blocks->give_back(bytes, Blocks::Block(memory, Blocks::Free{bytes}));
  };
  at::Tensor tensor = at::from_blob(data, c10::IntArrayRef(shape.data(), shape.size()),
                                    std::move(release), at::TensorOptions(dtype));
  block.release();  // the tensor owns it from here on
  return tensor;
}

}  // namespace tessera::detail
