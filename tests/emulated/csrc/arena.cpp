#include "arena.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <map>
#include <mutex>

#if defined(__linux__) && defined(__x86_64__) && defined(PKEY_DISABLE_ACCESS)
#define EMU_HAS_PKEYS 1
#else
#define EMU_HAS_PKEYS 0
#endif

namespace emu::arena {
namespace {

constexpr size_t kGrain = size_t(64) << 10;
constexpr size_t kLargest = size_t(256) << 30;
constexpr size_t kSmallest = size_t(4) << 30;

struct Arena {
  char* base = nullptr;
  size_t bytes = 0;
  size_t used = 0; // everything above is fresh
  int pkey = -1;
  bool guarded = false;
  std::mutex mutex;
  std::map<char*, size_t> spare; // pieces given back, by address

  Arena() {
    // Nothing is committed before it is touched, so the size only has to exceed any capacity. A
    // strict overcommit setting or an address limit may still refuse it: take what is granted.
    for (size_t want = kLargest; want >= kSmallest && base == nullptr; want /= 2) {
      void* got = mmap(
          nullptr, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (got != MAP_FAILED) {
        base = static_cast<char*>(got);
        bytes = want;
      }
    }
    TORCH_CHECK(base != nullptr, "emu: no address space for the device arena");
#if EMU_HAS_PKEYS
    pkey = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    if (pkey >= 0 && pkey_mprotect(base, bytes, PROT_READ | PROT_WRITE, pkey) != 0) {
      pkey_free(pkey);
      pkey = -1;
    }
    guarded = pkey >= 0;
#endif
  }
};

Arena& arena() {
  static Arena* a = new Arena;
  return *a;
}

#if EMU_HAS_PKEYS
thread_local int opened = 0; // nesting depth in this thread
thread_local int team = 0; // threads of this thread's parallel regions that hold the right

// Rights belong to a thread and are inherited when it starts. The workers of parallel regions run
// kernels only, so they are given the right once and keep it.
void open_team(int pkey) {
  const int threads = at::get_num_threads();
  if (team == threads || at::in_parallel_region()) {
    return;
  }
  at::parallel_for(0, threads, 1, [pkey](int64_t, int64_t) { pkey_set(pkey, 0); });
  team = threads;
}
#endif

} // namespace

size_t rounded(size_t bytes) {
  return (bytes + kGrain - 1) / kGrain * kGrain;
}

char* take(size_t bytes) {
  auto& a = arena();
  bytes = rounded(bytes);
  std::lock_guard<std::mutex> guard(a.mutex);
  for (auto it = a.spare.begin(); it != a.spare.end(); ++it) {
    if (it->second >= bytes) {
      char* data = it->first;
      const size_t rest = it->second - bytes;
      a.spare.erase(it);
      if (rest > 0) {
        a.spare.emplace(data + bytes, rest);
      }
      return data;
    }
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, a.used + bytes <= a.bytes, "emu: the device arena of ", a.bytes, " bytes is full");
  char* data = a.base + a.used;
  a.used += bytes;
  return data;
}

void give_back(char* data, size_t bytes) {
  auto& a = arena();
  std::lock_guard<std::mutex> guard(a.mutex);
  madvise(data, bytes, MADV_DONTNEED);
  auto next = a.spare.lower_bound(data);
  if (next != a.spare.end() && data + bytes == next->first) {
    bytes += next->second;
    next = a.spare.erase(next);
  }
  if (next != a.spare.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == data) {
      before->second += bytes;
      return;
    }
  }
  a.spare.emplace(data, bytes);
}

bool contains(const void* pointer) {
  auto& a = arena();
  auto* p = static_cast<const char*>(pointer);
  return p >= a.base && p < a.base + a.bytes;
}

bool is_protected() {
  return arena().guarded;
}

void guard(bool on) {
#if EMU_HAS_PKEYS
  auto& a = arena();
  std::lock_guard<std::mutex> held(a.mutex);
  if (a.pkey < 0 || a.guarded == on) {
    return;
  }
  constexpr int kNobodys = 0; // the key of all other memory
  TORCH_CHECK(
      pkey_mprotect(a.base, a.bytes, PROT_READ | PROT_WRITE, on ? a.pkey : kNobodys) == 0,
      "emu: the protection of the device arena could not be changed");
  a.guarded = on;
#endif
}

#if EMU_HAS_PKEYS
Access::Access() {
  const int pkey = arena().pkey;
  if (pkey >= 0 && opened++ == 0) {
    pkey_set(pkey, 0);
    open_team(pkey);
  }
}

Access::~Access() {
  const int pkey = arena().pkey;
  if (pkey >= 0 && --opened == 0) {
    pkey_set(pkey, PKEY_DISABLE_ACCESS);
  }
}
#else
Access::Access() = default;
Access::~Access() = default;
#endif

} // namespace emu::arena
