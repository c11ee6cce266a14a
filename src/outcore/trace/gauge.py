"""How much of a budget activations and temporaries take, so that chunks can have the rest.

[Note: Reserve]
The peak of each kind of lap is measured the first time it runs (and again when its inputs grow). While it
is measured, no chunk stays on the host longer than it is used (unless all of them take less than half the
budget), and each allocation at once pushes out what it must: then its bytes are there already, and near the smallest
budget they come on top. Where a step was traced without values before, what a window will take is set aside when it
opens, and nothing comes on top. Later laps of that kind set aside, window by window
(see `outcore.trace.profile`), what was measured, and keep what is read ahead out of the next windows too.

[Note: Whose turn it is]
The meter is a dispatch mode, and those form a stack that Python code must leave in the order in which it
entered. A lap may begin and end within a block of the user's that does the same (a mode of their own) or that
puts back the thread's state as it was (``inference_mode``, a node of autograd). So the meter never enters
above a foreign mode, leaves only from the top of the stack and in the mode of inference in which it entered,
and counts as gone where somebody else took it down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from outcore.errors import BudgetError
from outcore.memory.ledger import Ledger, Tier
from outcore.trace.extents import Extents, covers
from outcore.trace.meter import Meter
from outcore.trace.profile import Profile

ACTIVATIONS = "activations"
"""The kind of bytes that are set aside, as the ledger knows it: temporaries count among them."""


SHAPES = 64
"""Profiles of one kind of lap, of inputs none of which cover the others. Beyond these the oldest is measured again."""


class Gauge(Protocol):
    """Told of laps; sets aside what they allocate beside chunks."""

    def expect(self, profile: Profile) -> None:
        """A lap that nobody measured yet will take so much, as far as is known (by a step traced without values)."""

    def begin(self, key: Hashable, inputs: Extents) -> None:
        """A lap starts on inputs of these shapes."""

    def window(self, key: Hashable) -> None:
        """A unit is about to be opened, or was closed."""

    def end(self, whole: bool = True) -> None:
        """The lap is over, whether or not it was completed.

        Args:
            whole: not if its forward raised: what it took so far is no measure for the next.
        """

    @property
    def largest(self) -> int:
        """The most bytes that any kind of lap took so far."""


class Unmeasured:
    """Sets nothing aside: what a compiled graph takes for itself can't be seen. Implements `Gauge`."""

    largest = 0

    def expect(self, profile: Profile) -> None:
        pass

    def begin(self, key: Hashable, inputs: Extents) -> None:
        pass

    def window(self, key: Hashable) -> None:
        pass

    def end(self, whole: bool = True) -> None:
        pass


class Owner(Protocol):
    """What shares a budget with activations: the pool on the host, the stage on a device."""

    @property
    def pinned(self) -> int:
        """Bytes that are in use and can't leave."""

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set so many bytes of the budget aside; what no longer fits leaves. What comes before it is needed
        must leave ``ahead`` bytes."""

    def hold_idle(self, on: bool) -> None:
        """Whether what is not in use may stay."""


class MeteredGauge:
    """Measures laps with a `Meter` on the device that computes.

    Args:
        device: where activations live.
        tier: the tier whose budget they share.
        owner: who holds the rest of it.
        budget: bytes of that tier.
        roomy: whether all chunks together take a small part of the budget.
        outside: called with the storage (as `Meter` names it) of every tensor an operator reads, in measured laps.
        settled: called when a lap is over, to give back what its activations left behind.
        refused: called with what is raised because activations don't fit.
    """

    def __init__(
        self,
        device: torch.device,
        tier: Tier,
        owner: Owner,
        ledger: Ledger,
        budget: int,
        roomy: bool,
        outside: Callable[[int], None],
        settled: Callable[[], None],
        refused: Callable[[BudgetError], None] = lambda error: None,
    ) -> None:
        self._device = device
        self._tier: Tier = tier
        self._owner = owner
        self._ledger = ledger
        self._budget = budget
        self._roomy = roomy
        self._outside = outside
        self._settled = settled
        self._tell_refused = refused
        self._known: defaultdict[Hashable, list[Profile]] = defaultdict(list)
        self._profile: Profile | None = None
        self._position = 0
        self._refused = False
        self._refused_in = -1
        self._meter: Meter | None = None
        self._inference = False
        self._key: Hashable = None
        self._reserved = 0
        self._largest = 0
        self._expected: Profile | None = None
        self._foreseen = 0

    @property
    def largest(self) -> int:
        """The highest peak of any kind of lap measured so far, in bytes."""
        return max((known.peak for profiles in self._known.values() for known in profiles), default=0)

    def expect(self, profile: Profile) -> None:
        self._expected = profile

    def begin(self, key: Hashable, inputs: Extents) -> None:
        self.end()
        if self._meter is not None:  # it can't end here: go on measuring
            return
        known = self._known[key]
        self._key = key
        covering = [profile for profile in known if covers(profile.inputs, inputs)]
        if covering:
            self._profile, self._position = min(covering, key=lambda profile: profile.peak), 0
            self._reserve(*self._profile.around(0))
            return
        self._profile, self._position, self._refused = Profile(inputs), 0, False
        self._foreseen = 0
        self._reserve(0, max((profile.peak for profile in known), default=0))
        self._largest = 0
        modes = _get_current_dispatch_mode_stack()
        if modes and not isinstance(modes[-1], Meter):
            return
        self._inference = torch.is_inference_mode_enabled()
        self._owner.hold_idle(self._roomy)
        self._meter = Meter(self._device, self._outside, self._grown)
        self._meter.__enter__()

    def window(self, key: Hashable) -> None:
        profile = self._profile
        if profile is None:
            return
        if self._meter is not None:
            profile.note(self._meter.take_window())
            profile.open(key)
            self._foresee(key)
        elif len(profile.keys) > 1:
            found = profile.find(key, self._position + 1)
            if found is not None:  # a use that was not there when it was measured needs what the last one did
                self._position = found
                self._reserve(*profile.around(found))

    def _foresee(self, key: Hashable) -> None:
        """In a measured lap: set aside now what the window is expected to take, not when it takes it."""
        expected = self._expected
        found = None if expected is None else expected.find(key, self._foreseen + 1)
        if expected is not None and found is not None:
            self._foreseen = found
            wanted = min(expected.peaks[found], self._budget - self._owner.pinned)
            if wanted > self._reserved:
                self._reserve(wanted, wanted)

    def _grown(self, live: int) -> None:
        """A new peak: make room for it and, where nothing is foreseen, for one more allocation of its kind."""
        if self._refused and self._refused_in not in (-1, torch._C._current_graph_task_id()):
            return  # the backward that didn't fit is over: what is allocated now is somebody else's
        self._ledger.touch_peak(self._tier, max(0, live - self._reserved), ACTIVATIONS)
        self._largest = max(self._largest, live - self._reserved)
        if live > self._reserved:
            if self._owner.pinned + live > self._budget:
                self._refused, self._refused_in = True, torch._C._current_graph_task_id()
                raise self._refusal(live)  # a local name for it would keep its frames, and what they hold
            room = self._budget - self._owner.pinned
            more = self._largest if self._expected is None else 0
            self._reserve(min(live + more // 2, room), min(live + more, room))

    def _refusal(self, live: int) -> BudgetError:
        error = BudgetError(
            self._tier,
            self._owner.pinned + live,
            self._budget,
            f"{live:,} bytes of that are activations and temporaries, so far: give the {self._tier} more, "
            "use a smaller batch or recomputation",
        )
        self._tell_refused(error)
        return error

    def _reserve(self, nbytes: int, ahead: int) -> None:
        """Chunks leave before the bytes are held, and come after they are given back, so that no peak has both."""
        if nbytes > self._reserved:
            self._owner.reserve(nbytes, ahead)  # if it can't, what is held stays as it was
            self._hold(nbytes)
        else:
            self._hold(nbytes)
            self._owner.reserve(nbytes, ahead)

    def _hold(self, nbytes: int) -> None:
        before, self._reserved = self._reserved, nbytes
        self._ledger.hold(self._tier, nbytes - before, ACTIVATIONS)

    def end(self, whole: bool = True) -> None:
        if self._key is None and self._meter is None:
            return
        modes = _get_current_dispatch_mode_stack()
        if self._meter is None:
            self._reserve(0, 0)
            self._key = self._profile = None
        elif self._meter not in modes:  # taken down by whoever put an older state of the thread back
            self._over(self._meter, whole)
        elif self._meter is modes[-1] and self._inference == torch.is_inference_mode_enabled():
            self._meter.__exit__(None, None, None)
            assert self._profile is not None
            self._profile.note(self._meter.take_window())
            if whole and not self._refused:  # what did not fit is no measure for what does
                self._learn(self._key, self._profile)
            self._over(self._meter, whole)
        self._settled()

    def _learn(self, key: Hashable, profile: Profile) -> None:
        """What was measured with inputs that these cover isn't needed any more."""
        others = [known for known in self._known[key] if not covers(profile.inputs, known.inputs)]
        self._known[key] = [*others[1 - SHAPES :], profile]

    def _over(self, meter: Meter, whole: bool) -> None:
        meter.retire()
        left = meter.live if whole and not self._refused else 0  # what raised lets go of all
        self._reserve(left, left)
        self._meter = self._key = self._profile = None
        self._owner.hold_idle(True)
