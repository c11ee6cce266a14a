#include "allocator.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <set>

#include "arena.h"
#include "config.h"
#include "place.h"

// [Note: accounting]
// The bytes counted are those asked for, exactly. A block occupies the next multiple of 64 bytes of
// address space, which is not counted: address space is plenty, and so fragmentation never matters.
// Freed bytes leave `allocated` at once. A freed block that record_stream keeps for a stream still counts
// towards the capacity (`active`) until that stream is past the point of the free.
//
// [Note: poison]
// A freed block is filled with 0xFF (NaN in every float type) in the order of its own stream: at once if
// the stream is idle, else as a job of the stream. The fill is not an act of the program, so the checker does
// not see it, and another stream that is given the block waits for the fill behind the scenes (`Block::poisoned`).

namespace emu {

struct Segment {
  char* data;
  size_t bytes;
};

namespace {

constexpr size_t kAlign = 64;
constexpr size_t kSmallSegment = size_t(8) << 20;

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->span != b->span ? a->span < b->span : a->data < b->data;
  }
};

struct Pending { // freed, but other streams still use it
  Block* block;
  size_t size;
  std::vector<std::pair<Stream*, Ticket>> uses;
};

void release(void* context);

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override;
  void free(Block* block);
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    arena::Access access;
    std::memcpy(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream s) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override;
  void resetAccumulatedStats(c10::DeviceIndex) override;
  void resetPeakStats(c10::DeviceIndex) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override;

  int64_t made = 0;

 private:
  void make_room(size_t size);
  Block* find(size_t span, int stream_id);
  Block* carve(size_t span, int stream_id);
  void trim(Block* block, size_t span);
  void put_back(Block* block);
  Block* join_free_neighbours(Block* block);
  void poison(Block* block);
  bool settle_pending();
  [[noreturn]] void out_of_memory(size_t size, const char* why);

  std::array<std::set<Block*, BySize>, kStreams> free_;
  std::vector<Pending> pending_;
  size_t pending_bytes_ = 0;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

Allocator& allocator() {
  static Allocator* a = new Allocator;
  return *a;
}

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

void release(void* context) {
  // A forked child only leaks: its copies of the locks may be held by threads that it does not have.
  if (context != nullptr && !forked()) {
    allocator().free(static_cast<Block*>(context));
  }
}

void Allocator::out_of_memory(size_t size, const char* why) {
  size_t live = 0;
  size_t limit = 0;
  {
    auto guard = lock();
    ++stats_.num_ooms;
    live = static_cast<size_t>(stats_.allocated_bytes[kAll].current);
    limit = config().capacity;
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "emu out of memory: asked for ", size, " bytes with ", live, " of ", limit,
      " bytes allocated", why);
}

// Returns with room for `size` bytes under the capacity, waiting for blocks on their way back if it must.
void Allocator::make_room(size_t size) {
  for (;;) {
    std::vector<std::pair<Stream*, Ticket>> uses;
    {
      auto guard = lock();
      settle_pending();
      const size_t active = static_cast<size_t>(stats_.allocated_bytes[kAll].current) + pending_bytes_;
      if (active + size <= config().capacity) {
        return;
      }
      if (!pending_.empty()) {
        uses = pending_.front().uses;
      }
    }
    if (uses.empty()) {
      out_of_memory(size, "");
    }
    for (auto& [s, ticket] : uses) {
      s->wait(ticket);
    }
  }
}

c10::DataPtr Allocator::allocate(size_t size) {
  const c10::Device device(c10::DeviceType::PrivateUse1, 0);
  if (size == 0) {
    return {nullptr, nullptr, &release, device};
  }
  check_not_forked();
  bool checking = false;
  bool fails = false;
  {
    auto guard = lock();
    const auto& c = config();
    checking = c.checker;
    fails = c.fail_allocation >= 0 && (made == c.fail_allocation || (c.fail_forever && made > c.fail_allocation));
    ++made;
  }
  if (fails) {
    out_of_memory(size, " (injected failure)");
  }
  make_room(size);
  const Place place = checking ? here("allocation") : 0;
  Stream& owner = current_stream();
  const size_t span = (size + kAlign - 1) / kAlign * kAlign;
  auto guard = lock();
  Block* block = find(span, owner.id);
  block->free = false;
  block->size = size;
  block->recorded.clear();
  if (checking) {
    checker::allocated(block->shadow, size, false, owner, place);
  } else {
    block->shadow.size = size;
    block->shadow.generation = 0;
  }
  stats_.allocation[kAll].increase(1);
  stats_.active[kAll].increase(1);
  for (auto* stat : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
    (*stat)[kAll].increase(size);
  }
  return {block->data, block, &release, device};
}

Block* Allocator::find(size_t span, int stream_id) {
  auto& list = free_[stream_id];
  Block key;
  key.span = span;
  auto best = list.lower_bound(&key);
  const Stream& owner = stream(stream_id);
  if (owner.held_by_this_thread()) {
    // A kernel's own allocation is written before the kernel ends, and so before a fill that waits for it.
    best = std::find_if(best, list.end(), [&](const Block* b) { return owner.done(b->poisoned); });
  }
  Block* block = nullptr;
  if (best != list.end()) {
    block = *best;
    list.erase(best);
  } else {
    block = carve(span, stream_id);
  }
  trim(block, span);
  return block;
}

Block* Allocator::carve(size_t span, int stream_id) {
  const size_t bytes = arena::rounded(std::max(span, span < kSmallSegment / 8 ? kSmallSegment : span));
  auto* block = new Block;
  block->data = arena::take(bytes);
  block->span = bytes;
  block->stream = stream_id;
  block->segment = new Segment{block->data, bytes};
  stats_.segment[kAll].increase(1);
  stats_.reserved_bytes[kAll].increase(bytes);
  ++stats_.num_device_alloc;
  if (config().poison) {
    arena::Access access;
    std::memset(block->data, kPoison, bytes);
  }
  return block;
}

// Cuts `block` down to `span` and puts the rest on the free list.
void Allocator::trim(Block* block, size_t span) {
  if (block->span == span) {
    return;
  }
  auto* rest = new Block;
  rest->data = block->data + span;
  rest->span = block->span - span;
  rest->stream = block->stream;
  rest->segment = block->segment;
  rest->poisoned = block->poisoned;
  rest->free = true;
  rest->before = block;
  rest->after = block->after;
  if (rest->after != nullptr) {
    rest->after->before = rest;
  }
  block->after = rest;
  block->span = span;
  free_[rest->stream].insert(rest);
}

void Allocator::free(Block* block) {
  bool checking = false;
  {
    auto guard = lock();
    checking = config().checker;
  }
  const Place place = checking ? here("free", false) : 0;
  auto guard = lock();
  if (checking) {
    checker::freed(block->shadow, stream(block->stream), block->recorded, place);
  }
  const size_t size = block->size;
  block->size = 0;
  stats_.allocation[kAll].decrease(1);
  stats_.allocated_bytes[kAll].decrease(size);
  stats_.requested_bytes[kAll].decrease(size);
  Pending pending{block, size, {}};
  for (int id : block->recorded) {
    Stream& user = stream(id);
    const Ticket tail = user.tail();
    if (id != block->stream && !user.done(tail)) {
      pending.uses.emplace_back(&user, tail);
    }
  }
  if (!pending.uses.empty()) {
    pending_bytes_ += size;
    pending_.push_back(std::move(pending));
    return;
  }
  stats_.active[kAll].decrease(1);
  stats_.active_bytes[kAll].decrease(size);
  put_back(block);
}

bool Allocator::settle_pending() {
  bool any = false;
  for (size_t i = 0; i < pending_.size();) {
    auto& p = pending_[i];
    const bool over =
        std::all_of(p.uses.begin(), p.uses.end(), [](const auto& use) { return use.first->done(use.second); });
    if (!over) {
      ++i;
      continue;
    }
    pending_bytes_ -= p.size;
    stats_.active[kAll].decrease(1);
    stats_.active_bytes[kAll].decrease(p.size);
    put_back(p.block);
    pending_.erase(pending_.begin() + i);
    any = true;
  }
  return any;
}

void Allocator::put_back(Block* block) {
  block->free = true;
  block->shadow.ranges.clear();
  if (config().poison) {
    poison(block);
  }
  free_[block->stream].insert(join_free_neighbours(block));
}

void Allocator::poison(Block* block) {
  Stream& owner = stream(block->stream);
  auto fill = [data = block->data, bytes = block->span] {
    arena::Access access;
    std::memset(data, kPoison, bytes);
  };
  if (owner.held_by_this_thread() || owner.done(owner.tail())) {
    fill();
  } else {
    block->poisoned = owner.submit(fill);
  }
}

Block* Allocator::join_free_neighbours(Block* block) {
  for (Block* other : {block->before, block->after}) {
    if (other == nullptr || !other->free) {
      continue;
    }
    free_[block->stream].erase(other);
    Block* low = other == block->before ? other : block;
    Block* high = other == block->before ? block : other;
    low->span += high->span;
    low->poisoned = std::max(low->poisoned, high->poisoned);
    low->after = high->after;
    if (low->after != nullptr) {
      low->after->before = low;
    }
    delete high;
    block = low;
  }
  return block;
}

void Allocator::emptyCache(c10::MempoolId_t) {
  synchronize_all();
  auto guard = lock();
  settle_pending();
  for (auto& list : free_) {
    for (auto it = list.begin(); it != list.end();) {
      Block* block = *it;
      if (block->span != block->segment->bytes) {
        ++it;
        continue;
      }
      arena::give_back(block->data, block->span);
      stats_.segment[kAll].decrease(1);
      stats_.reserved_bytes[kAll].decrease(block->span);
      ++stats_.num_device_free;
      delete block->segment;
      delete block;
      it = list.erase(it);
    }
  }
}

void Allocator::recordStream(const c10::DataPtr& pointer, c10::Stream s) {
  Block* block = block_of(pointer);
  if (block == nullptr) {
    return;
  }
  auto guard = lock();
  const int id = static_cast<int>(s.id());
  auto& recorded = block->recorded;
  if (id != block->stream && std::find(recorded.begin(), recorded.end(), id) == recorded.end()) {
    block->recorded.push_back(id);
  }
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex) {
  auto guard = lock();
  settle_pending();
  return stats_;
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex) {
  auto guard = lock();
  for (auto* stat :
       {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes, &stats_.reserved_bytes,
        &stats_.active_bytes, &stats_.requested_bytes}) {
    (*stat)[kAll].reset_accumulated();
  }
  stats_.num_ooms = 0;
}

void Allocator::resetPeakStats(c10::DeviceIndex) {
  auto guard = lock();
  for (auto* stat :
       {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes, &stats_.reserved_bytes,
        &stats_.active_bytes, &stats_.requested_bytes}) {
    (*stat)[kAll].reset_peak();
  }
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex) {
  auto guard = lock();
  settle_pending();
  const size_t total = config().capacity;
  const size_t active = static_cast<size_t>(stats_.allocated_bytes[kAll].current) + pending_bytes_;
  return {total - std::min(total, active), total};
}

} // namespace

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &release ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

c10::DeviceAllocator* device_allocator() {
  return &allocator();
}

int64_t allocations_made() {
  return allocator().made;
}

void restart_allocation_count() {
  allocator().made = 0;
}

} // namespace emu
