#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "allocator.h"
#include "arena.h"
#include "config.h"
#include "copies.h"

namespace emu {
namespace {

// What an operator's schema says, worked out once. Operators are few and live for ever.
struct Traits {
  std::vector<bool> writes; // by argument
  std::vector<bool> reads; // whether the value before the call matters
  bool takes_host_tensors = false; // indices may be host tensors, as on other accelerators
};

Traits traits_of(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> overwriting = {
      "aten::zero_",   "aten::fill_",        "aten::normal_", "aten::uniform_",    "aten::random_",
      "aten::exponential_", "aten::bernoulli_", "aten::cauchy_", "aten::log_normal_", "aten::geometric_"};
  // With beta = 0 these do not read their first argument, and programs pass an empty tensor then.
  static const std::unordered_set<std::string> with_beta = {
      "aten::addmm", "aten::addmv", "aten::addr", "aten::baddbmm", "aten::addbmm", "aten::_addmm_activation"};
  static const std::unordered_set<std::string> indexing = {
      "aten::index",       "aten::index_put",         "aten::index_put_", "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put"};
  Traits traits;
  for (const auto& argument : schema.arguments()) {
    const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    traits.writes.push_back(writes);
    traits.reads.push_back(!writes || !(argument.is_out() || overwriting.count(schema.name()) != 0));
  }
  if (with_beta.count(schema.name()) != 0) {
    traits.reads[0] = false;
  }
  traits.takes_host_tensors = indexing.count(schema.name()) != 0;
  return traits;
}

const Traits& cached_traits(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Traits> cache;
  const auto& schema = op.schema();
  auto found = cache.find(&schema);
  return found != cache.end() ? found->second : cache.emplace(&schema, traits_of(schema)).first->second;
}

// One call: the device arguments, their CPU aliases, and the way back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), traits_(cached_traits(op)), stream_(current_stream()) {}

  void run() {
    const char* name = op_.schema().name().c_str();
    {
      auto guard = lock();
      checking_ = config().checker;
    }
    replace_arguments();
    Place place = 0;
    if (checking_) {
      place = here(name);
      checker::launch(stream_, place, touches_);
    }
    PlaceHint hint(place);
    for (const auto& argument : arguments_) {
      wait_for_poison(stream_, argument.device);
    }
    Stream::Inline turn(stream_);
    arena::Access access;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    for (const auto& argument : arguments_) {
      if (argument.written) {
        take_over_resize(argument, place);
      }
    }
    replace_results(place);
  }

 private:
  struct Argument {
    at::Tensor device;
    at::Tensor cpu;
    bool written;
  };

  at::Tensor on_cpu(const at::Tensor& tensor, size_t index) {
    if (!tensor.defined()) {
      return tensor;
    }
    const char* name = op_.schema().name().c_str();
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(
          tensor.dim() == 0 || tensor.numel() == 0 || traits_.takes_host_tensors,
          "Expected all tensors to be on the same device, but ", name, " got one of shape ", tensor.sizes(), " on ",
          tensor.device(), " among tensors of the emulated device");
      return tensor;
    }
    const bool writes = traits_.writes[index];
    check_resident(tensor, name);
    if (checking_) {
      auto guard = lock();
      if (traits_.reads[index] || !writes) {
        add_touch(touches_, tensor, false, traits_.reads[index]);
      }
      if (writes) {
        add_touch(touches_, tensor, true, false);
      }
    }
    for (auto& known : arguments_) {
      if (known.device.is_same(tensor)) {
        known.written |= writes;
        return known.cpu;
      }
    }
    at::Tensor alias = alias_on_cpu(tensor);
    for (const auto& known : arguments_) {
      // Arguments that share a storage still do so as aliases, or overlap checks would be blind.
      if (known.device.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        alias.unsafeGetTensorImpl()->set_storage_keep_dtype(known.cpu.storage());
        break;
      }
    }
    arguments_.push_back(Argument{tensor, alias, writes});
    return alias;
  }

  void replace_arguments() {
    const size_t count = traits_.writes.size();
    const size_t first = stack_->size() - count;
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack_)[first + i];
      if (value.isTensor()) {
        value = on_cpu(value.toTensor(), i);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : value.toTensorVector()) {
          list.push_back(on_cpu(t, i));
        }
        value = std::move(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& t : value.toOptionalTensorVector()) {
          list.push_back(t.has_value() ? std::optional<at::Tensor>(on_cpu(*t, i)) : std::nullopt);
        }
        value = std::move(list);
      } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
        value = c10::Device(c10::DeviceType::CPU);
      }
    }
  }

  // An `out` argument that the kernel resized: its device tensor follows.
  void take_over_resize(const Argument& argument, Place place) {
    const auto& cpu = argument.cpu;
    const auto& device = argument.device;
    if (cpu.storage().data() != device.storage().data()) {
      const size_t bytes = cpu.storage().nbytes();
      auto* storage = device.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(device_allocator()->allocate(bytes));
      storage->set_nbytes(bytes);
      std::memcpy(storage->mutable_data(), cpu.storage().data(), bytes);
    }
    if (cpu.sizes() != device.sizes() || cpu.strides() != device.strides()) {
      device.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      note_written(device, place);
    }
  }

  // Memory that came into being during the operator holds the operator's result.
  void note_written(const at::Tensor& tensor, Place place) {
    c10::SmallVector<Touch, 1> touch;
    {
      auto guard = lock();
      add_touch(touch, tensor, true, false);
    }
    if (checking_ && !touch.empty()) {
      checker::produced(touch[0], stream_, place);
    }
  }

  at::Tensor on_device(const at::Tensor& result, Place place) {
    if (!result.defined() || !result.is_cpu()) {
      return result;
    }
    for (const auto& argument : arguments_) {
      if (argument.cpu.is_same(result)) {
        return argument.device;
      }
      if (argument.cpu.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(argument.device.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
            result.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(
            result.sizes(), result.strides(), result.storage_offset());
        return view;
      }
    }
    const auto [begin, end] = extent(result);
    at::Tensor made = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), device_allocator(),
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.scalar_type());
    if (begin != end) {
      const auto* from = static_cast<const char*>(result.storage().data()) + begin;
      std::memcpy(made.mutable_data_ptr(), from, end - begin);
      note_written(made, place);
    }
    return made;
  }

  void replace_results(Place place) {
    const size_t count = op_.schema().returns().size();
    const size_t first = stack_->size() - count;
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack_)[first + i];
      if (value.isTensor()) {
        value = on_device(value.toTensor(), place);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : value.toTensorVector()) {
          list.push_back(on_device(t, place));
        }
        value = std::move(list);
      }
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const Traits& traits_;
  Stream& stream_;
  bool checking_ = false;
  c10::SmallVector<Argument, 6> arguments_;
  c10::SmallVector<Touch, 8> touches_;
};

} // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

} // namespace emu
