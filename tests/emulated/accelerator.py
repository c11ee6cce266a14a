"""The emulated accelerator: a real torch device named ``emu``, for tests of code that needs one.

Its memory is an arena of its own with a hard capacity; its streams are threads; its copies take the time that
a stated bandwidth needs; its operators are the CPU's kernels over its own bytes, so results are bit-equal to
the CPU. A race checker follows every access (see ``csrc/checker.h``).

    from emulated import accelerator

    accelerator.configure(capacity=64 << 20, h2d_gbps=2.0)  # builds and registers the device on first use
    x = torch.ones(4, device="emu")
    ...
    accelerator.reset()                                      # back to the defaults; the device is hidden

The device stays registered for the life of the process, but ``torch.accelerator.is_available()`` is true only
between ``configure()`` and ``reset()``. It has to be registered (``load()``) before the first
backward pass of the process, because autograd counts devices then; ``tests/conftest.py`` sees to that.

Not supported: autocast, torch.nn.LSTM and GRU, sharing device tensors between processes.

Random numbers come from the host's default generator, so ``torch.manual_seed`` and ``torch.get_rng_state``
govern the device too, and dropout draws the same numbers as on the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _build

NAME = "emu"


class RaceError(RuntimeError):
    """Two accesses to the same bytes that nothing orders. The message names both places."""


class Race(NamedTuple):
    kind: str  #: "read", "write", "free" or "uninitialised"
    message: str
    before: str  #: the earlier access: operator, Python line, autograd node
    now: str  #: the later one


@functools.cache
def load() -> ModuleType:
    """The extension; builds it and registers the device on the first call."""
    extension = _build.load()
    torch.utils.rename_privateuse1_backend(NAME)
    extension.register_device()
    extension.force_fallbacks()
    extension.set_race_error(RaceError)
    torch._register_device_module(NAME, _device_module(extension))
    _check_autograd(extension)
    atexit.register(_leave)
    extension.set_enabled(False)
    return extension


def _leave() -> None:
    with contextlib.suppress(RuntimeError):  # a forked child has nothing to finish
        configure()
        load().small_backward()  # see its comment: autograd's thread must be idle when Python shuts down


def _check_autograd(extension: ModuleType) -> None:
    # The autograd engine counts the devices when it first runs and never again.
    try:
        extension.small_backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise RuntimeError(
            "the emulated device was loaded after a backward pass had run in this process; call "
            "accelerator.load() before the first one (tests/conftest.py does so for emulated tests)"
        ) from None


def configure(
    *,
    capacity: int = 8 << 30,
    h2d_gbps: float = 0.0,
    d2h_gbps: float = 0.0,
    checker: bool = True,
    raise_races: bool = True,
    poison: bool = True,
    delay_seed: int = 0,
    max_delay_ms: float = 0.0,
    delay_copy: int | None = None,
    fail_allocation: int | None = None,
    fail_forever: bool = False,
) -> None:
    """Set the device up and make it available. Waits for all streams, and forgets races, clocks and counts.

    capacity: bytes of device memory; one more raises ``torch.OutOfMemoryError``.
    h2d_gbps, d2h_gbps: bandwidth of each direction in 1e9 bytes per second, shared by all streams; 0 is as
        fast as memory allows.
    checker: follow every access, and keep the host from device memory where the CPU can; raise_races=False
        collects races without raising them.
    poison: fill fresh and freed device memory with 0xFF (NaN in every float type), and pinned memory that a
        copy is to fill, as soon as the copy is asked for.
    delay_seed, max_delay_ms: every copy between host and device, or only number delay_copy (from 0), is late
        by a uniformly random time that depends on the seed and the copy's number alone.
    fail_allocation: this device allocation (from 0) raises ``torch.OutOfMemoryError``, and with
        fail_forever every later one.
    """
    extension = load()
    extension.configure(
        capacity=capacity,
        h2d_gbps=h2d_gbps,
        d2h_gbps=d2h_gbps,
        checker=checker,
        raise_races=raise_races,
        poison=poison,
        delay_seed=delay_seed,
        max_delay_ms=max_delay_ms,
        delay_copy=-1 if delay_copy is None else delay_copy,
        fail_allocation=-1 if fail_allocation is None else fail_allocation,
        fail_forever=fail_forever,
    )
    extension.set_enabled(True)
    torch.accelerator.reset_peak_memory_stats()


def reset() -> None:
    """Wait for all streams, go back to the defaults, hide the device. Does nothing before the first use."""
    if load.cache_info().currsize:
        configure()
        load().set_enabled(False)


_M = TypeVar("_M", bound=torch.nn.Module)


def to_device(module: _M) -> _M:
    """Move a module to the device, keeping its Parameter objects and so its ties, as ``.to("cuda")`` does.

    torch replaces the Parameters of a module that moves between the CPU and a device of this kind, unless it
    is told to swap them.
    """
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(NAME)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)


def races() -> list[Race]:
    """All races since ``configure()``, raised or not (the first 64)."""
    return [Race(*race) for race in load().races()]


def clear_races() -> None:
    """Forget the races found so far, as a test does that expects them."""
    load().clear_races()


def check() -> None:
    """Raise a race that was found where nothing could be raised (a free), if there is one."""
    load().raise_pending()


def host_access(tensor: torch.Tensor, write: bool = False) -> None:
    """Tell the checker that the host now reads or writes this pinned host tensor."""
    load().host_access(tensor, write)


@contextlib.contextmanager
def host_watch() -> Iterator[None]:
    """Inside, every torch operator on pinned host tensors counts as a host access."""
    with _HostWatch():
        yield


class _HostWatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        on_host = all(t.device.type == "cpu" for t in tensors)
        if on_host and not func.is_view:
            names = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
            bound = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for name, value in bound.items():
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        host_access(tensor, write=name in names)
        return func(*args, **kwargs)


def host_register(tensor: torch.Tensor) -> None:
    """Pin memory of the caller: copies to and from this host tensor's bytes may then be asynchronous."""
    load().host_register(tensor.data_ptr(), tensor.nbytes)


def host_unregister(tensor: torch.Tensor) -> None:
    """Undo ``host_register``, after the copies that use the memory are over."""
    load().host_unregister(tensor.data_ptr())


def pinned_bytes() -> int:
    """Bytes of live pinned host memory, as asked for; registered memory is not counted."""
    return load().pinned_bytes()


def allocations_made() -> int:
    """Device allocations since ``configure()``, failed ones included."""
    return load().allocations_made()


def copies_made() -> int:
    """Copies between host and device since ``configure()``."""
    return load().copies_made()


def copy_delay_ms(number: int) -> float:
    """How late copy ``number`` is, in milliseconds."""
    return load().copy_delay_ms(number)


def is_protected() -> bool:
    """Whether protection keys keep the host from touching device memory on this machine."""
    return load().is_protected()


def _device_module(extension: ModuleType) -> ModuleType:
    """``torch.emu``: what torch's generic code asks of a device's module."""
    module = ModuleType(f"torch.{NAME}")

    def is_available() -> bool:
        return extension.is_enabled()

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    module.is_available = is_available
    module.is_initialized = lambda: True
    module._is_in_bad_fork = extension.forked
    module.device_count = lambda: int(is_available())
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: contextlib.nullcontext()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed = lambda seed: None  # the host's generator is seeded by torch.manual_seed itself
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = get_rng_state
    module.set_rng_state = set_rng_state
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    return module
