// The device's address space: one reserved range that the host cannot touch where the CPU allows.
#pragma once

#include <cstddef>

namespace emu::arena {

// A fresh or recycled piece of the arena, a multiple of 64 KiB long. Throws when nothing is left.
char* take(size_t bytes);
void give_back(char* data, size_t bytes); // its pages go back to the system

bool contains(const void* pointer);
bool is_protected(); // whether protection keys guard the arena
void guard(bool on); // whether they shall, where the CPU has them; no kernel may run meanwhile
size_t rounded(size_t bytes);

// Opens the arena to this thread (and to the threads of its parallel regions) for its lifetime.
class Access {
 public:
  Access();
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};

} // namespace emu::arena
