// Memory of the stand-in device: an arena that is mapped twice. Its addresses, which tensors show,
// may not be read or written; tasks reach the same bytes at a fixed distance.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "engine.h"
#include "tessera/base/text.h"

namespace tessera::test::stand_in {
namespace {

constexpr std::size_t kArena = std::size_t{64} << 30, kGrain = 512;
constexpr int kPoison = 0xff;  // NaN; an index that is too small

char* first_byte = nullptr;
struct sigaction before{};

// Says who read, and lets the program end by the signal.
void on_fault(int, siginfo_t* info, void*) {
  const auto* at = static_cast<const char*>(info->si_addr);
  if (at >= first_byte && at < first_byte + kArena) {
    constexpr char kText[] = "a host read or write of memory of the stand-in device, by:\n";
    if (::write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) std::_Exit(3);
    void* frames[40];
    ::backtrace_symbols_fd(frames, ::backtrace(frames, 40), STDERR_FILENO);
  }
  ::sigaction(SIGSEGV, &before, nullptr);  // the instruction comes again
}

void map_arena(Engine& engine) {
  const auto reserve = [](int rights) {
    void* all = ::mmap(nullptr, kArena, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(all != MAP_FAILED, "the stand-in device has no room for its memory");
    return static_cast<char*>(all);
  };
  engine.arena = first_byte = reserve(PROT_NONE);
  engine.shadow = reserve(PROT_READ | PROT_WRITE);
  void* frames[1];
  ::backtrace(frames, 1);  // loads what it needs
  struct sigaction action{};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, &before);
}

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    Engine& engine = Engine::get();
    const std::lock_guard lock(engine.mutex);
    if (!engine.arena) map_arena(engine);
    const int device = current_device();
    auto& d = engine.devices[device];
    // What other streams have used is free once they have done so.
    std::erase_if(d.leaving, [&](const auto& leaving) {
      if (!std::ranges::all_of(leaving.second, [](const MarkPtr& m) { return m->done.load(); }))
        return false;
      for (const MarkPtr& mark : leaving.second)
        std::erase_if(leaving.first->accesses, [&](const Access& a) {
          return a.time <= mark->clock[static_cast<std::size_t>(a.stream)];
        });
      engine.hand_on(leaving.first);
      return true;
    });
    const std::size_t size = (std::max<std::size_t>(n, 1) + kGrain - 1) / kGrain * kGrain;
    const c10::StreamId stream = current_stream(device);
    Capture* capture = d.capture_of(stream);
    auto& free = capture ? capture->free[size] : d.free[{stream, size}];
    Block* block = nullptr;
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
      // In the order of the stream, which may have waited meanwhile for who used it before.
      engine.post(device, stream, "new memory", {{block->data, block->size, true}},
                  [to = block->data - engine.arena + engine.shadow, size] {
                    std::memset(to, kPoison, size);
                    return true;
                  });
    } else {
      TORCH_CHECK(engine.used + size <= kArena, "the stand-in device is full");
      block = new Block;
      block->data = engine.arena + engine.used;
      block->size = size;
      block->device = device;
      block->stream = stream;
      if (capture) block->capture = d.capture;
      std::memset(engine.shadow + engine.used, kPoison, size);
      engine.used += size;
      engine.blocks[block->data] = block;
    }
    block->asked = n;
    const std::int64_t now = counters().bytes += static_cast<std::int64_t>(n);
    auto& most = counters().most_bytes;
    for (std::int64_t seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
    }
    return {block->data, block, &give_back, stand_in::device(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "the stand-in device copies in tasks");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Engine::get().record(data.get(), stream.id());
  }
  /// Of all devices together.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = counters().bytes;
    stats.allocated_bytes[0].peak = counters().most_bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    counters().most_bytes = counters().bytes.load();
  }

 private:
  static void give_back(void* context) {
    auto* block = static_cast<Block*>(context);
    counters().bytes -= static_cast<std::int64_t>(block->asked);
    Engine& engine = Engine::get();
    const std::lock_guard lock(engine.mutex);
    engine.release(block);
  }
};

struct Pinned {
  std::map<const char*, std::pair<std::size_t, std::shared_ptr<void>>> all;
  std::mutex mutex;
  static Pinned& get() {
    static auto* const one = new Pinned;
    return *one;
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    void* data = std::malloc(n + 1);
    std::memset(data, kPoison, n + 1);
    Pinned& pinned = Pinned::get();
    const std::lock_guard lock(pinned.mutex);
    pinned.all[static_cast<const char*>(data)] = {n + 1, std::shared_ptr<void>(data, &end)};
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }

 private:
  static void end(void* data) { std::free(data); }
  static void give_back(void* data) {
    std::shared_ptr<void> last;
    Pinned& pinned = Pinned::get();
    const std::lock_guard lock(pinned.mutex);
    const auto found = pinned.all.find(static_cast<const char*>(data));
    last = found->second.second;
    pinned.all.erase(found);
  }
};

}  // namespace

c10::Allocator& memory() {
  static Memory one;
  return one;
}

namespace {

const bool registered_memory = [] {
  c10::SetAllocator(kDevice.type(), &memory());
  return true;
}();

}  // namespace

c10::Allocator& pinned_memory() {
  static PinnedMemory one;
  return one;
}

std::shared_ptr<void> hold_pinned(const void* data) {
  Pinned& pinned = Pinned::get();
  const std::lock_guard lock(pinned.mutex);
  auto next = pinned.all.upper_bound(static_cast<const char*>(data));
  if (next == pinned.all.begin()) return nullptr;
  const auto& [begin, block] = *--next;
  return static_cast<const char*>(data) < begin + block.first ? block.second : nullptr;
}

bool is_pinned(const void* data) { return hold_pinned(data) != nullptr; }

void Engine::record(const void* data, c10::StreamId stream) {
  const std::lock_guard lock(mutex);
  Block* block = block_of(data);
  if (block && stream != block->stream) block->recorded.insert(stream);
}

Block* Engine::block_of(const void* data) {
  auto next = blocks.upper_bound(static_cast<const char*>(data));
  if (next == blocks.begin()) return nullptr;
  Block* block = (--next)->second;
  return static_cast<const char*>(data) < block->data + block->size ? block : nullptr;
}

void Engine::release(Block* block) {
  if (block->recorded.empty()) return hand_on(block);
  std::vector<MarkPtr> marks;
  for (const c10::StreamId stream : block->recorded)
    marks.push_back(post(block->device, stream, "record_stream", {}, [] { return true; }));
  block->recorded.clear();
  devices[block->device].leaving.emplace_back(block, std::move(marks));
}

// Free, for what is allocated next on its stream.
void Engine::hand_on(Block* block) {
  auto& free = block->capture ? block->capture->free[block->size]
                              : devices[block->device].free[{block->stream, block->size}];
  free.push_back(block);
}

void Engine::touch(const Use& use, int stream, const Clock& clock, const char* what) {
  if (use.bytes == 0) return;
  Block* block = block_of(use.begin);
  if (!block) return fault(concat(what, " was given memory that is not the device's"));
  const auto* begin = static_cast<const char*>(use.begin);
  const char* end = begin + use.bytes;
  const auto me = static_cast<std::size_t>(stream);
  for (const Access& a : block->accesses) {
    if (a.end <= begin || end <= a.begin || !(a.writes || use.writes) || a.stream == stream)
      continue;
    if (a.time <= clock[static_cast<std::size_t>(a.stream)]) continue;
    fault(concat(what, " on stream ", stream % kStreams, use.writes ? " writes" : " reads",
                 " what ", a.what, " on stream ", a.stream % kStreams,
                 a.writes ? " writes" : " reads", " and no event orders them"));
    break;
  }
  std::erase_if(block->accesses, [&](const Access& a) {
    const bool inside = begin <= a.begin && a.end <= end;
    const bool known = a.stream == stream || a.time <= clock[static_cast<std::size_t>(a.stream)];
    return inside && known && (use.writes || (a.stream == stream && !a.writes));
  });
  block->accesses.push_back({begin, end, stream, clock[me], use.writes, what});
}

Use use(const at::Tensor& t, bool writes) {
  if (t.numel() == 0) return {nullptr, 0, writes};
  const auto elements = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size());
  return {t.const_data_ptr(), elements, writes};
}

at::Tensor over(const at::Tensor& t) {
  if (!is_here(t)) return t;
  Engine& engine = Engine::get();
  auto* data = static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
  at::Tensor same = at::from_blob(data && t.numel() ? data - engine.arena + engine.shadow : nullptr,
                                  t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
  if (t.is_conj()) same._set_conj(true);
  if (t.is_neg()) same._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    same.unsafeGetTensorImpl()->set_wrapped_number(true);
  return same;
}

}  // namespace tessera::test::stand_in
