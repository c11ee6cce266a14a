// What Python may ask of the device beyond torch's own interface.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "arena.h"
#include "checker.h"
#include "config.h"
#include "copies.h"
#include "device.h"
#include "operators.h"
#include "pinned.h"
#include "place.h"
#include "streams.h"

namespace py = pybind11;

namespace emu {
namespace {

void configure(
    size_t capacity, double h2d_gbps, double d2h_gbps, bool checker, bool raise_races, bool poison,
    uint64_t delay_seed, double max_delay_ms, int64_t delay_copy, int64_t fail_allocation, bool fail_forever) {
  synchronize_all();
  exchange_current(0);
  arena::guard(checker);
  auto guard = lock();
  config() = Config{capacity,   h2d_gbps,     d2h_gbps,   checker,         raise_races, poison,
                    delay_seed, max_delay_ms, delay_copy, fail_allocation, fail_forever};
  checker::forget();
  restart_allocation_count();
  restart_copy_count();
}

void host_access(const at::Tensor& tensor, bool write) {
  c10::SmallVector<Touch, 1> touches;
  {
    auto guard = lock();
    if (!config().checker || !tensor.is_cpu()) {
      return;
    }
    add_touch(touches, tensor, write, false);
  }
  if (!touches.empty()) {
    checker::host_access(touches[0], here(write ? "host write" : "host read"));
  }
}

// A backward pass on the device's autograd thread, on tensors that Python does not know. When it returns, the thread
// is done with all earlier passes. At exit that matters: it lets go of the last pass's tensors after the caller
// has got its result, and if that takes the GIL while Python shuts down, the process aborts.
void small_backward() {
  py::gil_scoped_release released;
  at::AutoGradMode with_grad(true);
  at::Tensor leaf = at::ones({1}, at::TensorOptions().device(c10::DeviceType::PrivateUse1));
  leaf.set_requires_grad(true).sum().backward();
}

py::list races() {
  py::list list;
  for (const auto& race : checker::races()) {
    list.append(py::make_tuple(race.kind, race.message, describe(race.first), describe(race.second)));
  }
  return list;
}

} // namespace
} // namespace emu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emu;
  m.def("register_device", &register_device);
  m.def("force_fallbacks", &force_fallbacks);
  m.def("set_enabled", &set_enabled);
  m.def("small_backward", &small_backward);
  m.def("is_enabled", &is_enabled);
  m.def("set_race_error", [](const py::object& type) { set_race_error(type.ptr()); });
  m.def(
      "configure", &configure, py::arg("capacity"), py::arg("h2d_gbps"), py::arg("d2h_gbps"), py::arg("checker"),
      py::arg("raise_races"), py::arg("poison"), py::arg("delay_seed"), py::arg("max_delay_ms"),
      py::arg("delay_copy"), py::arg("fail_allocation"), py::arg("fail_forever"));
  m.def("host_access", &host_access);
  m.def("races", &races);
  m.def("clear_races", [] {
    auto guard = lock();
    checker::clear();
  });
  m.def("raise_pending", &checker::raise_pending);
  m.def("allocations_made", &allocations_made);
  m.def("copies_made", &copies_made);
  m.def("copy_delay_ms", &copy_delay_ms);
  m.def("pinned_bytes", &pinned::live_bytes);
  m.def("host_register", [](uintptr_t address, size_t bytes) {
    pinned::add(reinterpret_cast<void*>(address), bytes);
  });
  m.def("host_unregister", [](uintptr_t address) { pinned::remove(reinterpret_cast<void*>(address)); });
  m.def("is_protected", &arena::is_protected);
  m.def("forked", &forked);
}
