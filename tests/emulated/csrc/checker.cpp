#include "checker.h"

#include "config.h"

namespace emu::checker {
namespace {

// With many ranges in one block, neighbours with the same history are joined again.
constexpr size_t kTidyAbove = 16;
constexpr size_t kKept = 64; // the first races tell the story

struct State {
  std::vector<Race> found;
  size_t raised = 0; // races up to here have been raised
  uint64_t generation = 1;
};

State& state() {
  static State* s = new State;
  return *s;
}

std::string actor_name(int actor) {
  if (actor == kHost) {
    return "the host";
  }
  return actor == 0 ? "the default stream" : "stream " + std::to_string(actor);
}

std::string bytes_of(const Range& range, const Shadow& shadow) {
  return " of bytes [" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ") of a block of " +
      std::to_string(shadow.size) + (shadow.host ? " in pinned host memory" : " in device memory");
}

void report(const char* kind, std::string message, const Epoch& first, const Epoch& second) {
  auto& found = state().found;
  if (found.size() < kKept) {
    found.push_back(Race{kind, std::move(message), first.place, second.place});
  }
}

void report_unordered(
    const char* kind, const char* second_did, const Epoch& second, const Range& range, const Shadow& shadow,
    const char* first_did, const Epoch& first) {
  report(
      kind,
      std::string(second_did) + " " + actor_name(second.actor) + bytes_of(range, shadow) +
          " is not ordered after " + first_did + " " + actor_name(first.actor),
      first, second);
}

void refresh(Shadow& shadow) {
  if (shadow.generation != state().generation) {
    shadow.generation = state().generation;
    shadow.ranges.assign(1, Range{0, shadow.size, true, {}, {}});
  }
}

// Makes `at` a boundary between ranges and returns the index of the range that begins there.
size_t split(std::vector<Range>& ranges, size_t at) {
  size_t i = 0;
  while (i < ranges.size() && ranges[i].end <= at) {
    ++i;
  }
  if (i < ranges.size() && ranges[i].begin < at) {
    Range tail = ranges[i];
    tail.begin = at;
    ranges[i].end = at;
    ranges.insert(ranges.begin() + i + 1, std::move(tail));
    ++i;
  }
  return i;
}

bool same_history(const Range& a, const Range& b) {
  return a.filled == b.filled && a.write == b.write && a.reads == b.reads;
}

void tidy(std::vector<Range>& ranges) {
  size_t kept = 0;
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (same_history(ranges[kept], ranges[i])) {
      ranges[kept].end = ranges[i].end;
    } else if (++kept != i) {
      ranges[kept] = std::move(ranges[i]);
    }
  }
  ranges.resize(kept + 1);
}

void note_read(Range& range, const Epoch& read) {
  for (auto& earlier : range.reads) {
    if (earlier.actor == read.actor) {
      earlier = read;
      return;
    }
  }
  range.reads.push_back(read);
}

void check(const Range& range, const Shadow& shadow, const Touch& touch, const Clock& clock, const Epoch& now) {
  const char* kind = touch.write ? "write" : "read";
  const char* did = touch.write ? "write by" : "read by";
  if (!clock.covers(range.write.actor, range.write.tick)) {
    report_unordered(kind, did, now, range, shadow, range.filled ? "write by" : "allocation on", range.write);
  } else if (touch.needs_value && !range.filled) {
    report(
        "uninitialised",
        "read by " + actor_name(now.actor) + bytes_of(range, shadow) +
            ", which nothing has written since the allocation",
        range.write, now);
  }
  if (!touch.write) {
    return;
  }
  for (const auto& read : range.reads) {
    if (!clock.covers(read.actor, read.tick)) {
      report_unordered(kind, did, now, range, shadow, "read by", read);
      return;
    }
  }
}

// The ranges that the touch covers, with boundaries at its ends.
std::pair<size_t, size_t> covered(const Touch& touch) {
  Shadow& shadow = *touch.shadow;
  refresh(shadow);
  const size_t end = std::min(touch.end, shadow.size);
  if (touch.begin >= end) {
    return {0, 0};
  }
  if (shadow.ranges.size() == 1 && touch.begin == 0 && end == shadow.size) {
    return {0, 1};
  }
  const size_t first = split(shadow.ranges, touch.begin);
  return {first, split(shadow.ranges, end)};
}

void check(const Touch& touch, const Clock& clock, const Epoch& now) {
  const auto [first, last] = covered(touch);
  for (size_t i = first; i < last; ++i) {
    check(touch.shadow->ranges[i], *touch.shadow, touch, clock, now);
  }
}

void commit(const Touch& touch, const Epoch& now) {
  const auto [first, last] = covered(touch);
  if (first == last) {
    return;
  }
  auto& ranges = touch.shadow->ranges;
  if (touch.write) {
    ranges[first].end = ranges[last - 1].end;
    ranges[first].filled = true;
    ranges[first].write = now;
    ranges[first].reads.clear();
    ranges.erase(ranges.begin() + first + 1, ranges.begin() + last);
  } else {
    for (size_t i = first; i < last; ++i) {
      note_read(ranges[i], now);
    }
  }
  if (ranges.size() > kTidyAbove) {
    tidy(ranges);
  }
}

// Judges all touches of one piece of work, then notes them, reads before writes. Work that is refused
// by an exception does not run and leaves no trace, so one fault makes one report.
void check_and_commit(c10::ArrayRef<Touch> touches, const Clock& clock, const Epoch& now) {
  const size_t before = state().found.size();
  for (const auto& touch : touches) {
    check(touch, clock, now);
  }
  if (config().raise_races && state().found.size() != before) {
    return;
  }
  for (const bool write : {false, true}) {
    for (const auto& touch : touches) {
      if (touch.write == write) {
        commit(touch, now);
      }
    }
  }
}

std::string full_message(const Race& race) {
  return race.message + "\n  now:    " + describe(race.second) + "\n  before: " + describe(race.first);
}

} // namespace

void allocated(Shadow& shadow, size_t size, bool host, const Stream& stream, Place place) {
  shadow.generation = state().generation;
  shadow.size = size;
  shadow.host = host;
  // Pinned memory comes from the host, which is ordered before whatever it launches.
  Epoch birth = host ? Epoch{} : Epoch{stream.id, stream.clock.at[stream.id], place};
  shadow.ranges.assign(1, Range{0, size, host, birth, {}});
}

void freed(Shadow& shadow, const Stream& stream, const std::vector<int>& recorded, Place place) {
  refresh(shadow);
  Clock clock = stream.clock;
  clock.join(host_clock());
  const auto ordered = [&](const Epoch& e) {
    return clock.covers(e.actor, e.tick) || std::find(recorded.begin(), recorded.end(), e.actor) != recorded.end();
  };
  const Epoch now{stream.id, clock.at[stream.id], place};
  for (const auto& range : shadow.ranges) {
    if (!ordered(range.write)) {
      report_unordered("free", "free on", now, range, shadow, "write by", range.write);
      return;
    }
    for (const auto& read : range.reads) {
      if (!ordered(read)) {
        report_unordered("free", "free on", now, range, shadow, "read by", read);
        return;
      }
    }
  }
}

void launch(Stream& stream, Place place, c10::ArrayRef<Touch> touches) {
  {
    auto guard = lock();
    stream.clock.join(host_clock());
    const Epoch now{stream.id, ++stream.clock.at[stream.id], place};
    check_and_commit(touches, stream.clock, now);
  }
  raise_pending();
}

void produced(const Touch& touch, const Stream& stream, Place place) {
  auto guard = lock();
  commit(touch, Epoch{stream.id, stream.clock.at[stream.id], place});
}

void host_access(const Touch& touch, Place place) {
  {
    auto guard = lock();
    const Epoch now{kHost, ++host_clock().at[kHost], place};
    check_and_commit(touch, host_clock(), now);
  }
  raise_pending();
}

void raise_pending() {
  Race race;
  {
    auto guard = lock();
    auto& s = state();
    if (s.raised == s.found.size()) {
      return;
    }
    if (!config().raise_races) {
      s.raised = s.found.size();
      return;
    }
    race = s.found[s.raised];
    s.raised = s.found.size();
  }
  throw_race(full_message(race));
}

std::vector<Race> races() {
  std::vector<Race> copy;
  {
    auto guard = lock();
    copy = state().found;
  }
  for (auto& race : copy) {
    race.message = full_message(race);
  }
  return copy;
}

void clear() {
  state().found.clear();
  state().raised = 0;
}

void forget() {
  auto& s = state();
  clear();
  ++s.generation;
  for (int id = 0; id < kStreams; ++id) {
    stream(id).clock = Clock{};
  }
  host_clock() = Clock{};
}

} // namespace emu::checker
