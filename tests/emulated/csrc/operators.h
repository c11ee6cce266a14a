#pragma once

#include <string>
#include <vector>

namespace emu {

// Sends the operators of [Note: forced fallback] to the CPU's kernels and returns their names. Once, at load.
std::vector<std::string> force_fallbacks();

} // namespace emu
