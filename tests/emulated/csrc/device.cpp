// The device as torch's generic accelerator code sees it: guard, streams, events, hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "allocator.h"
#include "arena.h"
#include "config.h"
#include "copies.h"
#include "device.h"
#include "pinned.h"
#include "place.h"
#include "streams.h"

namespace emu {
namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

std::atomic<bool> enabled{true};

c10::Stream wrap(int id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

Stream& unwrap(const c10::Stream& s) {
  return stream(static_cast<int>(s.id()));
}

// One recording of an event. Waiters keep the recording they were given, so recording again is safe.
struct Recording {
  Stream* stream = nullptr;
  Ticket ticket = 0;
  Clock clock;
  std::shared_ptr<std::chrono::steady_clock::time_point> time; // set once the recording is complete
};

struct Event {
  Recording last; // guarded by lock()
};

Recording recording_of(void* event) {
  auto guard = lock();
  return static_cast<Event*>(event)->last;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "emu: there is one device, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  // Always one: the autograd engine asks once in a process, and the device may be hidden at that time.
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return wrap(current_stream().id);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return wrap(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return wrap(new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return wrap(new_stream());
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return wrap(exchange_current(unwrap(s).id));
  }
  bool queryStream(const c10::Stream& s) const override {
    Stream& own = unwrap(s);
    if (!own.done(own.tail())) {
      return false;
    }
    emu::synchronize(own);
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    emu::synchronize(unwrap(s));
    checker::raise_pending();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize_all();
    checker::raise_pending();
  }

  void record(
      void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    Stream& own = unwrap(s);
    Recording now;
    now.stream = &own;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      now.time = std::make_shared<std::chrono::steady_clock::time_point>(std::chrono::steady_clock::now());
      if (!own.done(own.tail())) {
        own.submit([time = now.time] { *time = std::chrono::steady_clock::now(); });
      }
    }
    now.ticket = own.tail();
    auto guard = lock();
    own.clock.join(host_clock());
    now.clock = own.clock;
    static_cast<Event*>(*event)->last = now;
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) {
      return;
    }
    const Recording seen = recording_of(event);
    Stream& own = unwrap(s);
    own.submit_wait(*seen.stream, seen.ticket);
    auto guard = lock();
    own.clock.join(seen.clock);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    const Recording seen = recording_of(event);
    if (!seen.stream->done(seen.ticket)) {
      return false;
    }
    auto guard = lock();
    host_saw(seen.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    const Recording seen = recording_of(event);
    seen.stream->wait(seen.ticket);
    {
      auto guard = lock();
      host_saw(seen.clock);
    }
    checker::raise_pending();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const Recording a = recording_of(first);
    const Recording b = recording_of(second);
    TORCH_CHECK(a.time && b.time, "emu: both events need enable_timing=True");
    a.stream->wait(a.ticket);
    b.stream->wait(b.ticket);
    return std::chrono::duration<double, std::milli>(*b.time - *a.time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& s) const override {
    device_allocator()->recordStream(pointer, s);
  }
};

// A storage that changes its size moves to a block of the current stream, as on other accelerators.
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "emu: this storage cannot be resized");
  c10::DataPtr fresh = device_allocator()->allocate(bytes);
  const size_t keep = std::min(bytes, storage->nbytes());
  if (keep > 0) {
    const auto view = [&](c10::DataPtr data) {
      c10::Storage whole(c10::Storage::use_byte_size_t{}, keep, std::move(data), device_allocator(), false);
      auto t = at::detail::make_tensor<c10::TensorImpl>(
          std::move(whole), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<uint8_t>());
      t.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(keep)});
      return t;
    };
    // The storages change hands for the copy, so that the checker sees whose bytes move.
    at::Tensor from = view(storage->set_data_ptr(c10::DataPtr(nullptr, kDevice)));
    at::Tensor to = view(std::move(fresh));
    copy_from(from, to, true);
    fresh = to.storage().set_data_ptr(c10::DataPtr(nullptr, kDevice));
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return enabled;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return enabled ? 1 : 0;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  // Random numbers come from the host's generator: torch.manual_seed() and torch.get_rng_state() govern both.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return arena::contains(pointer) ? kDevice : c10::Device(c10::DeviceType::CPU);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return pinned::is_pinned(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned::host_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace

void set_enabled(bool on) {
  enabled = on;
}

bool is_enabled() {
  return enabled;
}

void register_device() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, pinned::host_allocator());
  c10::SetAllocator(c10::DeviceType::PrivateUse1, device_allocator());
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new Guard);
}

} // namespace emu
