// Streams: queues of jobs, each run by a thread of its own, and events between them.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "clock.h"

namespace emu {

using Ticket = uint64_t; // the n-th piece of work of a stream

class Stream {
 public:
  explicit Stream(int id) : id(id) {}

  Ticket submit(std::function<void()> job); // runs on the stream's thread, after all before it
  void submit_wait(const Stream& other, Ticket ticket); // later work waits for the other stream's
  Ticket tail() const; // the ticket that stands for all work so far
  bool done(Ticket ticket) const;
  void wait(Ticket ticket) const; // releases the GIL while it blocks

  // Work run in the calling thread in stream order: waits for all earlier work, then holds the
  // stream until it is destroyed.
  class Inline {
   public:
    explicit Inline(Stream& stream);
    ~Inline();
    Inline(const Inline&) = delete;
    Inline& operator=(const Inline&) = delete;

   private:
    Stream& stream_;
  };

  bool held_by_this_thread() const; // by an Inline

  const int id;
  Clock clock; // guarded by emu::lock()

 private:
  void work();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  Ticket submitted_ = 0;
  Ticket completed_ = 0;
  bool inline_ = false;
  bool started_ = false;
};

Stream& stream(int id);
Stream& current_stream(); // of the calling thread
int exchange_current(int id);
int new_stream(); // ids 1 to 31, then round again

Clock& host_clock(); // guarded by emu::lock()
void host_saw(const Clock& clock); // the host waited for work that has this clock

// Waits for a ticket and orders the host after everything the stream had been given by now.
void synchronize(Stream& stream);
void synchronize_all();

void check_not_forked();
bool forked();

} // namespace emu
