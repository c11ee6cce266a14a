// Device memory: exact accounting, a hard capacity, free lists per stream.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

#include "checker.h"
#include "streams.h"

namespace emu {

struct Segment;

// A run of bytes of a segment, in use or free. Blocks of a segment form a list in address order.
struct Block {
  char* data = nullptr;
  size_t span = 0; // bytes it occupies, a multiple of 64
  size_t size = 0; // bytes asked for; 0 while free
  int stream = 0; // whose free list it belongs to
  bool free = false;
  Segment* segment = nullptr;
  Block* before = nullptr;
  Block* after = nullptr;
  Ticket poisoned = 0; // its own stream's work that fills it with poison, see [Note: poison]
  std::vector<int> recorded; // streams named by record_stream
  Shadow shadow;
};

// The block behind a device storage; null for an empty storage or memory of someone else.
Block* block_of(const c10::DataPtr& pointer);

c10::DeviceAllocator* device_allocator();

// Bytes and counts, all under emu::lock().
int64_t allocations_made();
void restart_allocation_count();

} // namespace emu
