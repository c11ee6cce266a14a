#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "config.h"

namespace emu::pinned {
namespace {

struct Use { // a copy that may still run
  Stream* stream;
  Ticket ticket;
  const char* begin;
  const char* end;
};

struct HostBlock {
  size_t bytes = 0;
  Shadow shadow;
  std::vector<Use> uses;

  bool busy() {
    uses.erase(
        std::remove_if(uses.begin(), uses.end(), [](const Use& use) { return use.stream->done(use.ticket); }),
        uses.end());
    return !uses.empty();
  }
};

using Blocks = std::map<const char*, std::unique_ptr<HostBlock>, std::greater<>>;

struct State {
  Blocks blocks; // by address, descending, so that lower_bound finds the block at or below
  std::vector<std::pair<void*, std::unique_ptr<HostBlock>>> leaving; // freed while a copy used them
  size_t live = 0;
};

State& state() {
  static State* s = new State;
  return *s;
}

Blocks::iterator find(const void* pointer) {
  auto& blocks = state().blocks;
  const char* p = static_cast<const char*>(pointer);
  auto it = blocks.lower_bound(p);
  return it != blocks.end() && p < it->first + it->second->bytes ? it : blocks.end();
}

void insert(void* pointer, size_t bytes) {
  auto block = std::make_unique<HostBlock>();
  block->bytes = bytes;
  checker::allocated(block->shadow, bytes, true, stream(0), 0);
  state().blocks[static_cast<char*>(pointer)] = std::move(block);
}

// Memory freed while a copy used it goes back to the system once the copy is over, as the caching host
// allocators of real accelerators do it.
void settle_leaving() {
  auto& leaving = state().leaving;
  for (size_t i = 0; i < leaving.size();) {
    if (leaving[i].second->busy()) {
      ++i;
      continue;
    }
    std::free(leaving[i].first);
    leaving.erase(leaving.begin() + i);
  }
}

void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  auto guard = lock();
  auto it = find(pointer);
  state().live -= it->second->bytes;
  state().leaving.emplace_back(pointer, std::move(it->second));
  state().blocks.erase(it);
  settle_leaving();
}

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 4096, bytes) == 0, "emu: no host memory for ", bytes, " pinned bytes");
    auto guard = lock();
    settle_leaving();
    insert(data, bytes);
    state().live += bytes;
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void* pointer, void*, c10::Stream s) override {
    Stream& own = stream(static_cast<int>(s.id()));
    const Ticket tail = own.tail();
    auto guard = lock();
    used_by(pointer, 1, own, tail);
    return true;
  }
  void empty_cache() override {
    auto guard = lock();
    settle_leaving();
  }
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

} // namespace

at::HostAllocator* host_allocator() {
  static HostAllocator* a = new HostAllocator;
  return a;
}

bool is_pinned(const void* pointer) {
  auto guard = lock();
  return find(pointer) != state().blocks.end();
}

void add(void* pointer, size_t bytes) {
  auto guard = lock();
  TORCH_CHECK(find(pointer) == state().blocks.end(), "emu: this host memory is pinned already");
  insert(pointer, bytes);
}

void remove(void* pointer) {
  std::vector<Use> uses;
  {
    auto guard = lock();
    auto it = find(pointer);
    TORCH_CHECK(it != state().blocks.end() && it->first == pointer, "emu: this host memory is not registered");
    uses = it->second->uses;
    state().blocks.erase(it);
  }
  for (const Use& use : uses) {
    use.stream->wait(use.ticket);
  }
}

size_t live_bytes() {
  auto guard = lock();
  return state().live;
}

Shadow* shadow_at(const void* pointer, size_t* offset) {
  auto it = find(pointer);
  if (it == state().blocks.end()) {
    return nullptr;
  }
  *offset = static_cast<size_t>(static_cast<const char*>(pointer) - it->first);
  return &it->second->shadow;
}

void used_by(const void* pointer, size_t bytes, Stream& s, Ticket ticket) {
  auto it = find(pointer);
  if (it != state().blocks.end()) {
    it->second->busy();
    const auto* begin = static_cast<const char*>(pointer);
    it->second->uses.push_back(Use{&s, ticket, begin, begin + bytes});
  }
}

bool in_use(const void* pointer, size_t bytes) {
  auto it = find(pointer);
  if (it == state().blocks.end() || !it->second->busy()) {
    return false;
  }
  const auto* begin = static_cast<const char*>(pointer);
  const auto& uses = it->second->uses;
  return std::any_of(
      uses.begin(), uses.end(), [&](const Use& use) { return use.begin < begin + bytes && begin < use.end; });
}

} // namespace emu::pinned
