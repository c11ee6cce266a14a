#include "copies.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "allocator.h"
#include "arena.h"
#include "config.h"
#include "pinned.h"
#include "streams.h"

namespace emu {
namespace {

using Time = std::chrono::steady_clock::time_point;
using Seconds = std::chrono::duration<double>;

// One direction of the bus. All streams share it: a copy begins when the copies before it are over.
class Link {
 public:
  Time reserve(size_t bytes, double gbps) {
    std::lock_guard<std::mutex> guard(mutex_);
    const Time now = std::chrono::steady_clock::now();
    const Seconds needed(static_cast<double>(bytes) / (gbps * 1e9));
    free_at_ = std::max(now, free_at_) + std::chrono::duration_cast<Time::duration>(needed);
    return free_at_;
  }

 private:
  std::mutex mutex_;
  Time free_at_{};
};

enum class Way { to_device, to_host, on_device };

struct Copy {
  Way way;
  char* to;
  const char* from;
  size_t bytes;
  double gbps; // 0: not throttled
  double delay_ms;
};

std::atomic<int64_t> made{0};

Link& link(Way way) {
  static auto* to_device = new Link;
  static auto* to_host = new Link;
  return way == Way::to_device ? *to_device : *to_host;
}

double delay_of(const Config& c, int64_t number) {
  if (c.max_delay_ms <= 0 || (c.delay_copy >= 0 && c.delay_copy != number)) {
    return 0;
  }
  // A copy's delay depends on its number alone, so that a run with the same seed is late in the same places.
  std::seed_seq seed{c.delay_seed, static_cast<uint64_t>(number)};
  std::mt19937_64 generator(seed);
  return std::uniform_real_distribution<double>(0, c.max_delay_ms)(generator);
}

Copy describe_copy(Way way, void* to, const void* from, size_t bytes) {
  auto guard = lock();
  const Config& c = config();
  const double gbps = way == Way::to_device ? c.h2d_gbps : way == Way::to_host ? c.d2h_gbps : 0;
  const double delay = way == Way::on_device ? 0 : delay_of(c, made++);
  return Copy{way, static_cast<char*>(to), static_cast<const char*>(from), bytes, gbps, delay};
}

// Bytes arrive at the end of the time the link needs: whoever uses them earlier finds the old ones, and a
// source that is changed too early is seen changed.
void perform(const Copy& copy) {
  if (copy.delay_ms > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(copy.delay_ms));
  }
  constexpr double kMemcpyGbps = 8;
  Time end{};
  if (copy.gbps > 0) {
    end = link(copy.way).reserve(copy.bytes, copy.gbps);
    const Seconds move(static_cast<double>(copy.bytes) / (kMemcpyGbps * 1e9));
    std::this_thread::sleep_until(end - std::chrono::duration_cast<Time::duration>(move));
  }
  if (copy.to != nullptr) { // without a target, only the time passes
    arena::Access access;
    std::memmove(copy.to, copy.from, copy.bytes);
  }
  if (copy.gbps > 0) {
    std::this_thread::sleep_until(end);
  }
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// From now on the host may not look at the target before it has waited. If it does, it should not find old bytes
// that happen to be right. Earlier copies that still use the target need it as it is.
void poison_target(const Copy& copy) {
  auto guard = lock();
  if (config().poison && !pinned::in_use(copy.to, copy.bytes)) {
    std::memset(copy.to, kPoison, copy.bytes);
  }
}

// A copy of whole, equal layouts: bytes.
void copy_bytes(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const Way way = source.is_cpu() ? Way::to_device : target.is_cpu() ? Way::to_host : Way::on_device;
  static constexpr const char* kNames[] = {"copy to device", "copy to host", "copy on device"};
  const char* name = kNames[static_cast<int>(way)];
  Stream& s = current_stream();
  c10::SmallVector<Touch, 2> touches;
  bool checking = false;
  {
    auto guard = lock();
    checking = config().checker;
    if (checking) {
      add_touch(touches, source, false, false);
      add_touch(touches, target, true, false);
    }
  }
  if (checking) {
    checker::launch(s, here(name), touches);
  }
  for (const auto& t : {source, target}) {
    wait_for_poison(s, t);
  }
  const at::Tensor& host = way == Way::to_device ? source : target;
  const bool host_may_run_ahead =
      way == Way::on_device ? s.id != 0 : non_blocking && pinned::is_pinned(host.const_data_ptr());
  const Copy copy = describe_copy(way, target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  if (host_may_run_ahead) {
    if (way == Way::to_host) {
      poison_target(copy);
    }
    const Ticket ticket = s.submit([copy] { perform(copy); });
    if (way != Way::on_device) {
      auto guard = lock();
      pinned::used_by(host.const_data_ptr(), copy.bytes, s, ticket);
    }
    return;
  }
  {
    WithoutGil released; // first, so that the GIL is taken back after the stream is let go
    Stream::Inline turn(s);
    perform(copy);
  }
  if (way != Way::on_device) {
    synchronize(s);
  }
}

// A copy that changes dtype or layout and has a device side that is not one dense run of bytes, or that
// stays on the device: the CPU's copy over the same bytes, in stream order.
void copy_elements(const at::Tensor& source, const at::Tensor& target) {
  Stream& s = current_stream();
  c10::SmallVector<Touch, 2> touches;
  bool checking = false;
  {
    auto guard = lock();
    checking = config().checker;
    if (checking) {
      add_touch(touches, source, false, true);
      add_touch(touches, target, true, false);
    }
  }
  if (checking) {
    checker::launch(s, here("copy of elements"), touches);
  }
  for (const auto& t : {source, target}) {
    wait_for_poison(s, t);
  }
  const Way way = source.is_cpu() ? Way::to_device : target.is_cpu() ? Way::to_host : Way::on_device;
  {
    WithoutGil released; // first, so that the GIL is taken back after the stream is let go
    Stream::Inline turn(s);
    if (way != Way::on_device) {
      // The bytes cross the link as they are on the device side.
      const at::Tensor& device_side = way == Way::to_device ? target : source;
      perform(describe_copy(way, nullptr, nullptr, device_side.nbytes()));
    }
    arena::Access access;
    at::Tensor to = target.is_cpu() ? target : alias_on_cpu(target);
    to.copy_(source.is_cpu() ? source : alias_on_cpu(source));
  }
  if (way != Way::on_device) {
    synchronize(s);
  }
}

} // namespace

std::pair<size_t, size_t> extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {0, 0};
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const auto item = static_cast<size_t>(tensor.element_size());
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * item;
  return {begin, begin + static_cast<size_t>(last + 1) * item};
}

void check_resident(const at::Tensor& tensor, const char* op) {
  if (tensor.numel() == 0) {
    return;
  }
  const size_t end = extent(tensor).second;
  const size_t have = tensor.storage().nbytes();
  TORCH_CHECK(
      end <= have, "emu: ", op, " on a tensor of shape ", tensor.sizes(), " that needs ", end,
      " bytes of a storage of ", have, have == 0 ? " (released)" : "");
  TORCH_CHECK(tensor.storage().data() != nullptr, "emu: ", op, " on a tensor without memory, as fake tensors are");
}

at::Tensor alias_on_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  c10::Storage bytes(
      c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (tensor.is_conj()) {
    alias._set_conj(true);
  }
  if (tensor.is_neg()) {
    alias._set_neg(true);
  }
  return alias;
}

void add_touch(c10::SmallVectorImpl<Touch>& touches, const at::Tensor& tensor, bool write, bool needs_value) {
  auto [begin, end] = extent(tensor);
  if (begin == end) {
    return;
  }
  const bool dense = end - begin == static_cast<size_t>(tensor.numel() * tensor.element_size());
  if (Block* block = block_of(tensor.storage().data_ptr())) {
    touches.push_back(Touch{&block->shadow, begin, end, write, needs_value && dense});
    return;
  }
  if (tensor.is_cpu()) {
    size_t offset = 0;
    const auto* base = static_cast<const char*>(tensor.storage().data());
    if (Shadow* shadow = pinned::shadow_at(base + begin, &offset)) {
      touches.push_back(Touch{shadow, offset, offset + (end - begin), write, false});
    }
  }
}

void wait_for_poison(Stream& s, const at::Tensor& tensor) {
  Block* block = block_of(tensor.storage().data_ptr());
  if (block != nullptr && block->stream != s.id && block->poisoned != 0) {
    s.submit_wait(stream(block->stream), block->poisoned);
  }
}

at::Tensor copy_from(const at::Tensor& source_, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  const at::Tensor source = source_.sizes() == target.sizes() ? source_ : source_.expand(target.sizes());
  for (const auto& t : {source, target}) {
    if (t.is_privateuseone()) {
      check_resident(t, "copy_");
    }
  }
  if (same_layout(source, target)) {
    copy_bytes(source, target, non_blocking);
  } else if (source.is_cpu() && target.is_non_overlapping_and_dense()) {
    at::Tensor staged = at::empty_strided(target.sizes(), target.strides(), target.options().device(at::kCPU));
    staged.copy_(source);
    copy_bytes(staged, target, false);
  } else if (target.is_cpu() && source.is_non_overlapping_and_dense()) {
    at::Tensor staged = at::empty_strided(source.sizes(), source.strides(), source.options().device(at::kCPU));
    copy_bytes(source, staged, false);
    target.copy_(staged);
  } else {
    copy_elements(source, target);
  }
  return target;
}

int64_t copies_made() {
  return made;
}

double copy_delay_ms(int64_t number) {
  auto guard = lock();
  return delay_of(config(), number);
}

void restart_copy_count() {
  made = 0;
}

} // namespace emu
