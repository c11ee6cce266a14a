// Host memory that copies may use without waiting: allocated pinned, or registered by the caller.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "checker.h"
#include "streams.h"

namespace emu::pinned {

at::HostAllocator* host_allocator();

bool is_pinned(const void* pointer);
void add(void* pointer, size_t bytes); // memory of the caller
void remove(void* pointer); // waits for the copies that use it

size_t live_bytes();

// Both under emu::lock(). `offset` is set to the pointer's place in the block.
Shadow* shadow_at(const void* pointer, size_t* offset);
void used_by(const void* pointer, size_t bytes, Stream& stream, Ticket ticket);
bool in_use(const void* pointer, size_t bytes); // by a copy that may still run

} // namespace emu::pinned
