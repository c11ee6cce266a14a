// Places in the program: an operator name, the Python line that called it, the autograd node.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

namespace emu {

using Place = uint32_t; // an index into a table of distinct places; 0 is "unknown"

// The calling thread's place. `op` must live for ever (a literal or an operator's name).
// With may_take_gil false the Python line is noted only if this thread holds the GIL already:
// destructors run under locks of others, where waiting for the GIL could deadlock.
Place here(const char* op, bool may_take_gil = true);

std::string describe(Place place); // takes the GIL

// While it lives, here() answers `place` in this thread: what an operator allocates and frees inside
// belongs to the operator.
class PlaceHint {
 public:
  explicit PlaceHint(Place place);
  ~PlaceHint();
  PlaceHint(const PlaceHint&) = delete;
  PlaceHint& operator=(const PlaceHint&) = delete;

 private:
  Place before_;
};

// Raises `message` as the Python exception type that set_race_error() was given.
[[noreturn]] void throw_race(const std::string& message);
void set_race_error(PyObject* type);

// Releases the GIL for its lifetime if this thread holds it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_;
};

} // namespace emu
