// The operators that the device answers itself, and the ones that must not take torch's composite path.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>

#include "allocator.h"
#include "arena.h"
#include "config.h"
#include "copies.h"
#include "fallback.h"
#include "operators.h"
#include "place.h"

namespace emu {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::Layout::Strided, "emu: only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "emu: only host tensors can be pinned");
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_options(layout, pin);
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device>, std::optional<bool> pin) {
  check_options(layout, pin);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

// Reads one element, as .item() does: the host waits for the current stream.
at::Scalar local_scalar(const at::Tensor& self) {
  check_resident(self, "item");
  Stream& s = current_stream();
  c10::SmallVector<Touch, 1> touches;
  bool checking = false;
  {
    auto guard = lock();
    checking = config().checker;
    if (checking) {
      add_touch(touches, self, false, true);
    }
  }
  if (checking) {
    checker::launch(s, here("item"), touches);
  }
  wait_for_poison(s, self);
  at::Scalar value;
  {
    Stream::Inline turn(s);
    arena::Access access;
    value = at::native::_local_scalar_dense_cpu(alias_on_cpu(self));
  }
  synchronize(s);
  return value;
}

void record_stream(at::Tensor& self, at::Stream s) {
  device_allocator()->recordStream(self.storage().data_ptr(), s);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {items}, {});
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t{}, 0, device_allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(none), 0, {0}, {});
}

// [Note: attention]
// torch picks the attention kernel by device, and the CPU's flash kernel for the CPU only. Asking the CPU
// what it would choose, and then taking the same path, keeps the bits.
at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  // The choice looks at shapes, strides, dtypes and requires_grad only, so stand-ins without memory will do;
  // fake tensors come through here too.
  const auto like_cpu = [](const at::Tensor& t) {
    c10::Storage none(
        c10::Storage::use_byte_size_t{}, 0, c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)), nullptr,
        false);
    auto stand_in = at::detail::make_tensor<c10::TensorImpl>(
        std::move(none), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    stand_in.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
    if (t.requires_grad()) {
      stand_in.set_requires_grad(true);
    }
    return stand_in;
  };
  std::optional<at::Tensor> cpu_mask;
  if (mask.has_value()) {
    cpu_mask = like_cpu(*mask);
  }
  int64_t choice = 0;
  {
    // Dispatch modes have no business with the stand-ins.
    c10::impl::ExcludeDispatchKeyGuard no_python(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    choice = at::_fused_sdp_choice(
        like_cpu(query), like_cpu(key), like_cpu(value), cpu_mask, dropout_p, is_causal, scale, enable_gqa);
  }
  std::optional<at::Tensor> bias = mask;
  if (mask.has_value() && mask->scalar_type() == at::kBool) {
    const auto options = query.options();
    bias = at::where(
        *mask, at::zeros({}, options),
        at::zeros({}, options).fill_(-std::numeric_limits<double>::infinity()));
  }
  constexpr int64_t kFlash = 1;
  if (choice == kFlash) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, bias, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, bias, dropout_p, is_causal, std::nullopt, scale, enable_gqa));
}

// Accelerators have a fused dropout with a mask of its own; the CPU draws the noise in the input's dtype.
// Only the second takes the same random numbers as the CPU.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  at::Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  noise.div_(1 - p);
  return input.mul(noise);
}

auto boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&fallback>();
}

// [Note: forced fallback]
// Where an operator has a kernel of the CPU's own beside a composite one for every device, the device would
// run the composite one and round differently. The structured operators' composite wrappers stay: they
// allocate the result on the device and call the `out` form, which saves a copy of the result.
bool cpu_has_its_own(const c10::OperatorHandle& op) {
  if (!op.hasSchema() || !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
    return false;
  }
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(boxed());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("scaled_dot_product_attention", attention);
  m.impl("dropout", dropout);
  m.impl("convolution", boxed());
  m.impl("convolution_backward", boxed());
  m.impl("native_layer_norm", boxed());
  m.impl("native_group_norm", boxed());
}

// The copy resolves lazy conjugation and negation itself; torch's general answer would copy for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("dropout", dropout);
}

std::vector<std::string> force_fallbacks() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  std::vector<std::string> forced;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    auto op = dispatcher.findOp(name);
    if (op.has_value() && cpu_has_its_own(*op)) {
      const std::string full = c10::toString(name);
      library->impl(full.substr(6).c_str(), boxed());
      forced.push_back(full);
    }
  }
  return forced;
}

} // namespace emu
