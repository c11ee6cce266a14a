#include "config.h"

namespace emu {

Config& config() {
  static Config* c = new Config;
  return *c;
}

std::unique_lock<std::mutex> lock() {
  static auto* mutex = new std::mutex;
  return std::unique_lock<std::mutex>(*mutex);
}

} // namespace emu
