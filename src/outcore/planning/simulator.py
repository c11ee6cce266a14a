"""A training run on a virtual clock: what each tier holds, what each link moves, how long a step takes.

[Note: Clock]
Events, not samples: time passes when the training thread computes or waits, and disk and links serve what was
asked of them in the meantime. Nothing is random and nothing sleeps, so the same settings give the same plan. The
first step runs as a run's first does (nothing idle stays while activations are measured); the last one counts for
time, the highest for memory.

A span's time is the time of its matrix products at the machine's rate, and of everything else at the bandwidth of
its memory, or what its operators cost to launch if that is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outcore.model.unit import Unit
from outcore.planning.cache import Cache
from outcore.planning.fake_step import Trace
from outcore.planning.flow import Link, Piece
from outcore.planning.frames import Frame, Frames
from outcore.planning.machine import Machine
from outcore.planning.outcome import Limits, Outcome
from outcore.planning.pieces import Pieces, StorePieces
from outcore.planning.recorder import WITHIN
from outcore.planning.route import Route, Tick
from outcore.planning.work import Work
from outcore.trace.profile import Profile

STEPS = 3
"""Steps that are simulated: by the third, where things lie has settled."""


class Simulation:
    """A run with fixed settings.

    Args:
        units: from `outcore.planning.virtual.lay`.
        trace: of one micro-batch.
        accumulate: micro-batches of a step.
        occupied: bytes of buffers and resting tensors where the model computes.
        total: bytes of all chunks, as `outcore.planning.minimum.needs` counts them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        trace: Trace,
        machine: Machine,
        limits: Limits,
        *,
        accumulate: int,
        occupied: int,
        total: int,
    ) -> None:
        self._machine = machine
        self._limits = limits
        self._trace = trace
        self._accumulate = accumulate
        pieces = Pieces()
        self._stores = [[pieces.of(store) for store in unit.stores] for unit in units]
        self._profile = _profile(trace)
        self._roomy = 2 * total <= limits.host and limits.device is None
        self._seconds = [seconds_of(span.work, machine) for span in trace.spans]
        self._narrow = self._wide = self._route = Route(self._laps(False), len(pieces))
        if accumulate > 1:
            self._wide = Route(self._laps(True), len(pieces))
        self._cache = Cache(limits.host, limits.disk, machine.disk_read, machine.disk_write, self._route)
        self._frames: Frames | None = None
        if limits.device is not None:
            self._frames = Frames(
                [self._frame(stores) for stores in self._stores],
                self._cache,
                self._route,
                limits.device,
                Link(machine.link_in),
                Link(machine.link_out),
            )
        self._occupied = occupied
        self._update = 0.0
        self._compute = 0.0

    # -- construction -----------------------------------------------------------------------------

    @staticmethod
    def _frame(stores: Sequence[StorePieces]) -> Frame:
        return Frame(
            sum(s.nbytes for s in stores),
            max((s.nbytes for s in stores if s.gradients), default=0),
            [p for s in stores for p in s.parameters],
        )

    def _laps(self, wide: bool) -> list[list[Tick]]:
        """A step as it is believed to be, gradients being where one micro-batch on record had them."""
        lap: list[Tick] = []
        for span in self._trace.spans:
            phase, unit = span.event
            if phase == "forward":
                lap.append((span.event, tuple(self._parameters(unit))))
            elif phase == "backward":
                sums = [p for s in self._stores[unit] for p in (s.totals if wide else s.gradients)]
                lap.append((span.event, (*self._parameters(unit), *sums)))
        update: list[Tick] = []
        for index, stores in enumerate(self._stores):
            for s in stores:
                sums = list(s.totals if self._accumulate > 1 else s.gradients)
                for k, gradient in enumerate(sums):
                    needed = (gradient, s.parameters[k], *s.states[k : k + 1])
                    update.append((("update", index), needed))
        return [lap] * self._accumulate + [update]

    # -- a run ------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Fill the tiers, then take `STEPS` steps.

        Raises:
            BudgetError: a tier can't hold what must be there.
        """
        cache, frames = self._cache, self._frames
        for stores in self._stores:
            for s in stores:
                for k, parameter in enumerate(s.parameters):
                    filled = (parameter, *s.states[k : k + 1])
                    cache.bring(filled, fresh=True)
                    cache.release(filled)
        if frames is None:
            cache.borrow(self._occupied)
        else:
            frames.occupied = self._occupied
        self._step(0)
        first = self._peaks()
        cache.peak = cache.used + cache.reserved
        if frames is not None:
            frames.peak = frames.used + frames.reserved
        for number in range(1, STEPS - 1):
            self._step(number)
        before = self._totals()
        start = cache.now
        self._compute = self._update = 0.0
        self._step(STEPS - 1)
        settled = self._peaks()
        after = self._totals()
        difference = {name: after[name] - before[name] for name in after}
        links = ["disk read", "disk write"] if cache.disk is not None else []
        links += ["device in", "device out"] if frames is not None else []
        return Outcome(
            seconds=cache.now - start,
            compute=self._compute,
            update=self._update,
            waited={link: difference[f"waited {link}"] for link in links},
            busy={link: difference[f"busy {link}"] for link in links},
            moved={link: round(difference[f"moved {link}"]) for link in links},
            peak={tier: max(first[tier], settled[tier]) for tier in first},
            settled=settled,
        )

    def _peaks(self) -> dict[str, int]:
        found = {"host": self._cache.peak}
        if self._cache.disk is not None:
            found["disk"] = self._cache.disk_peak
        if self._frames is not None:
            found["device"] = self._frames.peak
        return found

    def _totals(self) -> dict[str, float]:
        found: dict[str, float] = {f"waited {link}": s for link, s in self._cache.waited.items()}
        disk, frames, machine = self._cache.disk, self._frames, self._machine
        if disk is not None:
            for index, (link, rate) in enumerate(
                (("disk read", machine.disk_read), ("disk write", machine.disk_write))
            ):
                found[f"moved {link}"] = disk.moved[index]
                found[f"busy {link}"] = disk.moved[index] / rate
        if frames is not None:
            found |= {f"waited {link}": s for link, s in frames.waited.items()}
            for link, server in (("device in", frames.link_in), ("device out", frames.link_out)):
                found[f"moved {link}"] = server.moved
                found[f"busy {link}"] = server.busy
        return found

    def _step(self, number: int) -> None:
        base = number * len(self._route)
        position = base
        for turn in range(self._accumulate):
            # what is on record of the lap before: see `outcore.planning.route`
            believed = self._narrow if turn in (1, 2) else self._wide
            self._cache.believe(believed, position)
            position = self._lap(position, turn, measured=number == 0 and turn == 0)
        self._updates(position)

    def _lap(self, position: int, turn: int, measured: bool) -> int:
        """One forward and backward. Returns the position of the next tick."""
        cache, frames = self._cache, self._frames
        holder = cache if frames is None else frames
        if measured and not self._roomy:
            holder.holding = False
        window = -1
        for span, seconds in zip(self._trace.spans, self._seconds, strict=True):
            phase, unit = span.event
            if phase not in WITHIN:
                window += 1
                now, ahead = self._profile.around(window)
                if measured:  # the gauge keeps some more, and never less than it had
                    now = ahead = max(holder.reserved, self._measured(span.peak, holder))
                holder.reserve(now, ahead)
            if phase in ("forward", "backward"):
                cache.advance(position)
                position += 1
                if frames is None:
                    cache.bring(self._parameters(unit))
                else:
                    frames.open(unit)
            elif phase == "closed":
                if frames is None:
                    cache.release(self._parameters(unit))
                else:
                    frames.close(unit)
            elif phase == "arrives":
                self._gather(unit, turn)
            elif phase == "gradient":
                self._gradients(unit, turn)
            self._compute += seconds
            cache.work(seconds)
        holder.reserve(0, 0)
        holder.holding = True
        return position

    def _measured(self, live: int, holder: Cache | Frames) -> int:
        """What the gauge sets aside while it measures: half of the largest allocation more, if there is room."""
        slack = self._trace.growth - self._trace.peak
        budget = self._limits.host if self._limits.device is None else self._limits.device
        return live + max(0, min(slack, budget - holder.used - live)) if live == self._trace.peak else live

    def _parameters(self, unit: int) -> list[Piece]:
        return [p for s in self._stores[unit] for p in s.parameters]

    def _gather(self, unit: int, turn: int) -> None:
        """Gradients of a unit begin to come, parameter by parameter."""
        for s in self._stores[unit]:
            if not s.gradients:
                continue
            if self._frames is not None:
                self._frames.buffer(s.nbytes)
                continue
            begun: set[int] = set()
            for k in (k for covered in s.arrivals for k in covered):
                self._arrive(s.gradients[k], s.totals[k], turn, first=k not in begun)
                begun.add(k)

    def _gradients(self, unit: int, turn: int) -> None:
        """The gradients of a unit are complete: their squares are summed, or they are sent down for it."""
        for s in self._stores[unit]:
            if not s.gradients:
                continue
            if self._frames is not None:
                self._frames.send(s.nbytes, s.gradients, turn == 0, partial(self._landed, s, turn))
                continue
            sums = s.gradients if turn == 0 else s.totals
            for piece in sums:
                self._squares(piece)
            passes = 3 if turn == 0 else 4
            self._spend(sum(p.nbytes for p in sums) * passes / self._machine.host_bandwidth)

    def _landed(self, s: StorePieces, turn: int, k: int) -> None:
        """A chunk of gradients came down. What the host does with it hides behind the device's work."""
        if turn > 0:
            self._arrive(s.gradients[k], s.totals[k], turn, first=True)
        self._squares(s.gradients[k] if turn == 0 else s.totals[k])

    def _squares(self, piece: Piece) -> None:
        self._cache.bring((piece,))
        self._cache.release((piece,))

    def _arrive(self, narrow: Piece, total: Piece, turn: int, first: bool) -> None:
        """A part of a chunk's gradients goes to where the chunk's gradients are."""
        cache = self._cache
        if turn == 0:
            cache.bring((narrow,), write=not first, fresh=first)
            cache.release((narrow,))
            return
        if turn == 1 and first and total is not narrow:
            cache.bring((narrow,))
            cache.bring((total,), fresh=True)
            cache.release((narrow, total))
            cache.discard(narrow)
        cache.bring((total,), write=True)
        cache.release((total,))

    def _spend(self, seconds: float) -> None:
        self._compute += seconds
        self._cache.work(seconds)

    def _updates(self, position: int) -> None:
        cache, frames = self._cache, self._frames
        if frames is not None:
            frames.synchronize()
        for stores in self._stores:
            for s in stores:
                sums = s.totals if self._accumulate > 1 else s.gradients
                for k, gradient in enumerate(sums):
                    written = (s.parameters[k], *s.states[k : k + 1])
                    cache.advance(position)
                    position += 1
                    cache.bring((gradient,))
                    cache.bring(written, write=True)
                    nbytes = gradient.nbytes + 2 * sum(piece.nbytes for piece in written)
                    seconds = nbytes / self._machine.update
                    self._update += seconds
                    cache.work(seconds)
                    cache.release((gradient, *written))
                    cache.discard(gradient)
        if frames is not None:
            for frame, stores in zip(frames.frames, self._stores, strict=True):
                if any(s.gradients for s in stores):
                    frames.free(frame)


def _profile(trace: Trace) -> Profile:
    """The windows of a lap, as `outcore.trace.gauge` notes them."""
    profile = Profile(trace.tokens)
    for span in trace.spans[1:]:
        if span.event[0] not in WITHIN:
            profile.open(span.event)
        profile.note(span.peak)
    profile.peaks[0] = max(profile.peaks[0], trace.spans[0].peak)
    return profile


def seconds_of(work: Work, machine: Machine) -> float:
    """Seconds that a span takes on the machine; see [Note: Clock]."""
    slowest = min(
        machine.flops.values()
    )  # for what a model computes in a precision that nobody stated a rate for
    products = sum(
        count / (machine.flops.get(dtype, slowest) * machine.reached) for dtype, count in work.flops.items()
    )
    return max(products + work.nbytes / machine.compute_bandwidth, work.operators * machine.overhead)
