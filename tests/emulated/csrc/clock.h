// Vector clocks: who has seen whose work.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace emu {

constexpr int kStreams = 32; // stream 0 is the default (compute) stream
constexpr int kHost = kStreams; // all host threads together are one actor
constexpr int kActors = kStreams + 1;

// `at[a]` is the newest tick of actor `a` that the owner of the clock is ordered after.
struct Clock {
  std::array<uint64_t, kActors> at{};

  void join(const Clock& other) {
    for (int a = 0; a < kActors; ++a) {
      at[a] = std::max(at[a], other.at[a]);
    }
  }
  bool covers(int actor, uint64_t tick) const {
    return actor < 0 || at[actor] >= tick;
  }
};

} // namespace emu
