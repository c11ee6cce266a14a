// Copies between host and device: asynchronous where that is allowed, throttled, late when told so.
#pragma once

#include <ATen/core/Tensor.h>

#include "checker.h"

namespace emu {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

// Bytes [begin, end) of the storage that the tensor may touch.
std::pair<size_t, size_t> extent(const at::Tensor& tensor);

// Raises if the storage was released: a kernel must never run on it.
void check_resident(const at::Tensor& tensor, const char* op);

// A CPU tensor over the same bytes. Only for use while the arena is open and the stream is held.
at::Tensor alias_on_cpu(const at::Tensor& tensor);

// What the checker has to know of an access to `tensor`, on the device or in pinned memory; appends nothing
// for plain host memory.
void add_touch(c10::SmallVectorImpl<Touch>& touches, const at::Tensor& tensor, bool write, bool needs_value);

// Makes `stream` wait for fills of poison in blocks that other streams own.
void wait_for_poison(Stream& stream, const at::Tensor& tensor);

int64_t copies_made(); // since configure()
void restart_copy_count();
double copy_delay_ms(int64_t number); // how late that copy is, by the configuration

} // namespace emu
