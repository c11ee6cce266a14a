// Operators by the CPU's kernels over the device's own bytes.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace emu {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace emu
