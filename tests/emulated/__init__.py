"""An emulated accelerator: a PrivateUse1 device for tests. See ``emulated.accelerator``."""
