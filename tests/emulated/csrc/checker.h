// The race checker. Every launch, wait and synchronisation is known when the program asks for it, so
// the order is judged by vector clocks at that moment and does not depend on how the threads run.
//
// [Note: what is a race]
// Two accesses to overlapping bytes of a block, one of them a write, must be ordered by the stream they share, by
// an event, or by the host having waited. Allocation counts as a write by the current stream at its
// newest work: the allocator may hand out memory that this work still uses. Freeing counts as a write by the
// stream the block was allocated on, for the same reason. Reading bytes that nothing has written
// since the allocation is reported too. All host threads count as one.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "clock.h"
#include "place.h"
#include "streams.h"

namespace emu {

struct Epoch { // one access
  int actor = -1; // -1: nobody
  uint64_t tick = 0;
  Place place = 0;

  bool operator==(const Epoch& o) const {
    return actor == o.actor && tick == o.tick && place == o.place;
  }
};

// What is known of the bytes [begin, end) of a block.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  bool filled = false; // written since the allocation
  Epoch write;
  c10::SmallVector<Epoch, 2> reads; // since that write, the newest of each actor
};

struct Shadow {
  uint64_t generation = 0; // of the checker's state; an older shadow is unknown
  size_t size = 0;
  bool host = false; // pinned host memory
  std::vector<Range> ranges; // sorted, covering [0, size)
};

struct Touch { // one access to come
  Shadow* shadow;
  size_t begin;
  size_t end;
  bool write;
  bool needs_value; // reads every byte of the range, so all must have been written
};

struct Race {
  std::string kind; // "read", "write", "free", "uninitialised"
  std::string message;
  Place first;
  Place second;
};

namespace checker {

// The caller of allocated(), freed(), clear() and forget() holds emu::lock(); the others take it.
void allocated(Shadow& shadow, size_t size, bool host, const Stream& stream, Place place);
void freed(Shadow& shadow, const Stream& stream, const std::vector<int>& recorded, Place place);

// A piece of work given to `stream`; raises a race that it makes, or one found since the last launch.
void launch(Stream& stream, Place place, c10::ArrayRef<Touch> touches);
void produced(const Touch& touch, const Stream& stream, Place place); // output of the newest launch
void host_access(const Touch& touch, Place place);
void raise_pending();

std::vector<Race> races();
void clear(); // forgets the races found
void forget(); // races, clocks of streams and what is known of memory

} // namespace checker
} // namespace emu
