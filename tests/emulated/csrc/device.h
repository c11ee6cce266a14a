#pragma once

namespace emu {

void register_device(); // with torch; once, at load
void set_enabled(bool on); // whether torch.accelerator reports a device
bool is_enabled();

} // namespace emu
