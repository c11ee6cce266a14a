#include "streams.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>

#include "config.h"
#include "place.h"

namespace emu {
namespace {

thread_local int current = 0;
thread_local const Stream* held = nullptr;
std::atomic<bool> after_fork{false};

// Leaked, as every object that a worker thread may still look at when the process ends.
struct Streams {
  std::array<std::unique_ptr<Stream>, kStreams> all;
  std::atomic<unsigned> made{0};
  Clock host;

  Streams() {
    for (int id = 0; id < kStreams; ++id) {
      all[id] = std::make_unique<Stream>(id);
    }
    // A forked child has no worker threads: waiting for one would hang, so it is refused instead.
    pthread_atfork(nullptr, nullptr, [] { after_fork = true; });
  }
};

Streams& streams() {
  static Streams* s = new Streams;
  return *s;
}

} // namespace

Ticket Stream::submit(std::function<void()> job) {
  check_not_forked();
  std::lock_guard<std::mutex> guard(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { work(); }).detach();
  }
  queue_.push_back(std::move(job));
  changed_.notify_all();
  return ++submitted_;
}

void Stream::submit_wait(const Stream& other, Ticket ticket) {
  if (&other == this || other.done(ticket)) {
    return;
  }
  submit([&other, ticket] { other.wait(ticket); });
}

Ticket Stream::tail() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return submitted_;
}

bool Stream::done(Ticket ticket) const {
  std::lock_guard<std::mutex> guard(mutex_);
  return completed_ >= ticket;
}

void Stream::wait(Ticket ticket) const {
  if (done(ticket)) {
    return;
  }
  check_not_forked();
  WithoutGil released;
  std::unique_lock<std::mutex> guard(mutex_);
  changed_.wait(guard, [&] { return completed_ >= ticket; });
}

void Stream::work() {
  std::unique_lock<std::mutex> guard(mutex_);
  for (;;) {
    changed_.wait(guard, [&] { return !queue_.empty() && !inline_; });
    auto job = std::move(queue_.front());
    queue_.pop_front();
    guard.unlock();
    job();
    job = nullptr;
    guard.lock();
    ++completed_;
    changed_.notify_all();
  }
}

bool Stream::held_by_this_thread() const {
  return held == this;
}

Stream::Inline::Inline(Stream& stream) : stream_(stream) {
  TORCH_INTERNAL_ASSERT(held == nullptr, "a kernel runs inside another");
  std::unique_lock<std::mutex> guard(stream.mutex_);
  if (stream.completed_ != stream.submitted_) {
    guard.unlock();
    check_not_forked();
    // The GIL comes back only after the stream is taken and its mutex is free again.
    WithoutGil released;
    guard.lock();
    stream.changed_.wait(guard, [&] { return stream.completed_ == stream.submitted_; });
    ++stream.submitted_;
    stream.inline_ = true;
    guard.unlock();
    held = &stream;
    return;
  }
  ++stream.submitted_;
  stream.inline_ = true;
  held = &stream;
}

Stream::Inline::~Inline() {
  std::lock_guard<std::mutex> guard(stream_.mutex_);
  ++stream_.completed_;
  stream_.inline_ = false;
  held = nullptr;
  stream_.changed_.notify_all();
}

Stream& stream(int id) {
  return *streams().all.at(id);
}

Stream& current_stream() {
  return stream(current);
}

int exchange_current(int id) {
  return std::exchange(current, id);
}

int new_stream() {
  return 1 + static_cast<int>(streams().made++ % (kStreams - 1));
}

Clock& host_clock() {
  return streams().host;
}

void host_saw(const Clock& clock) {
  host_clock().join(clock);
}

void synchronize(Stream& s) {
  Clock seen;
  {
    auto guard = lock();
    seen = s.clock;
  }
  s.wait(s.tail());
  auto guard = lock();
  host_saw(seen);
}

void synchronize_all() {
  for (int id = 0; id < kStreams; ++id) {
    synchronize(stream(id));
  }
}

bool forked() {
  return after_fork;
}

void check_not_forked() {
  TORCH_CHECK(!after_fork, "emu: the device was used before fork(); start the child process by spawn instead");
}

} // namespace emu
