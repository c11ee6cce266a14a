// What the tests can set, and the one lock that guards all bookkeeping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace emu {

constexpr int kPoison = 0xFF; // NaN in every float type

struct Config {
  size_t capacity = size_t(8) << 30; // bytes of device memory
  double h2d_gbps = 0; // 0: as fast as memcpy; GB are 1e9 bytes
  double d2h_gbps = 0;
  bool checker = true;
  bool raise_races = true; // false: only collect them
  bool poison = true;
  uint64_t delay_seed = 0;
  double max_delay_ms = 0; // 0: no copy is late
  int64_t delay_copy = -1; // -1: every copy may be late, else only this one (counted from 0)
  int64_t fail_allocation = -1; // counted from 0 since configure(); -1: none
  bool fail_forever = false;
};

Config& config(); // read and written under lock(), except by the copy path's own snapshot

// One lock for the allocator, the pinned blocks, the clocks and the checker. It is held for short
// computations only: never while waiting for a stream, and never while taking the GIL.
std::unique_lock<std::mutex> lock();

} // namespace emu
