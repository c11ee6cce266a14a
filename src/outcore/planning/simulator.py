"""A training run on a virtual clock: what each tier holds, what each link moves, how long a step takes.

[Note: Clock]
Events, not samples: time passes when the training thread computes or waits, and disk, links and the update thread
serve what was asked of them in the meantime. Nothing is random and nothing sleeps, so the same settings give the same
plan. The first step runs as a run's first does (nothing idle stays while activations are measured, and there is no
update before it), and neither in it nor in the second, the first with updates, is the order of uses on record. The
third begins with what they left where, so the fourth is the first that is like all that follow. It counts for time,
the highest for memory.

How long a span computes is found by running it, where the machine is at hand, or follows from the machine's rates
(`outcore.planning.timing`).

[Note: A step]
As `outcore.engine` has it: a step marks updates as due. They are done under the next forward, by a thread of their own
in the order of that forward as far as there is room, or where their unit is used; or at once in the step, where
activations leave room for less than two of them.

[Note: Who shares what]
Where the CPU computes, updates take its cores from it, and so do the threads of the disk (pages, checksums, what the
pool does about each transfer), which in their turn wait for cores. ``outcore profile`` measures what is left to each
(`Machine.both`, `Machine.slowed`), and what a transfer takes from computing: the seconds that the disk's threads spend
on it, not a share of the time that the disk is busy (`Machine.io_turn`, `Machine.io_rate`). A team of threads that
computes waits for the one whose core was taken, so on two cores each such second costs computing about one. And whoever
uses a chunk first sees to it that it is there and that others leave for it: `Machine.use`. Two updates at a time share
the cores in any case.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial

from outcore.chunks.chunk import Residence
from outcore.chunks.guards import Access
from outcore.model.saved.store import SOON
from outcore.model.unit import Unit
from outcore.planning.cache import Cache
from outcore.planning.fake_step import Trace
from outcore.planning.flow import Link, Piece, Traffic
from outcore.planning.frames import Frame, Frames
from outcore.planning.machine import Machine
from outcore.planning.minimum import Needs
from outcore.planning.outcome import Limits, Outcome
from outcore.planning.pieces import StorePieces
from outcore.planning.recorder import WITHIN
from outcore.planning.saved import SavedPieces
from outcore.planning.timing import Timing
from outcore.planning.updates import Job, Updater

STEPS = 4
"""Steps that are simulated; see [Note: Clock]."""


class SlowError(Exception):
    """A simulated step takes longer than anybody wants to know."""


class Simulation:
    """A run with fixed settings.

    Args:
        units: from `outcore.planning.virtual.lay`.
        trace: of one micro-batch.
        accumulate: micro-batches of a step.
        occupied: bytes of buffers and resting tensors where the model computes.
        found: what `outcore.planning.minimum.needs` says of the same units.
        timing: how long spans take.

    Attributes:
        updates_at_once: whether updates are done in the step, because there is no room beside a forward.
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
        found: Needs,
        timing: Timing,
    ) -> None:
        self._machine = machine
        self._limits = limits
        self._trace = trace
        self._accumulate = accumulate
        self._stores = [[StorePieces.of(s, unit.index in trace.wide) for s in unit.stores] for unit in units]
        self._saved = SavedPieces.of(trace.spans)
        self._profile = trace.profile()
        on_host = limits.device is None
        self._roomy = 2 * found.total <= limits.host and on_host
        with timing.within(limits.host, self._roomy):
            self._seconds = [timing.seconds(span) for span in trace.spans]
        self._cache = Cache(limits.host, limits.disk, self._traffic(), found.working)
        self._updater = Updater(self._cache, machine.beside)
        self._cache.beside = self._updater
        self._jobs: dict[int, list[Job]] = {}
        most = trace.growth if on_host else 0
        self.updates_at_once = limits.host - most < 2 * found.update
        self._frames: Frames | None = None
        if limits.device is not None:
            self._frames = Frames(
                [self._frame(stores) for stores in self._stores],
                self._cache,
                limits.device,
                Link(machine.link_in),
                Link(machine.link_out),
                machine.use,
            )
        self._occupied = occupied
        self._compute = 0.0

    # -- construction -----------------------------------------------------------------------------

    def _traffic(self) -> Traffic:
        """What is done about pieces that a device computes with is counted where they are copied."""
        m = self._machine
        use = m.use if self._limits.device is None else 0.0
        return Traffic(m.disk_read, m.disk_write, m.turn, m.io_turn, m.io_rate, m.slowed, use)

    @staticmethod
    def _frame(stores: Sequence[StorePieces]) -> Frame:
        return Frame(
            sum(s.nbytes for s in stores),
            sum(s.buffer for s in stores),
            [p for s in stores for p in s.parameters],
        )

    # -- a run ------------------------------------------------------------------------------------

    def run(self, patience: float = math.inf) -> Outcome:
        """Fill the tiers, then take `STEPS` steps.

        Args:
            patience: seconds that the last step may take.

        Raises:
            BudgetError: a tier can't hold what must be there.
            SlowError: it takes longer.
        """
        cache, frames = self._cache, self._frames
        for stores in self._stores:
            for s in stores:
                for k, parameter in enumerate(s.parameters):
                    filled = (parameter, *s.states[k : k + 1])
                    cache.bring(filled, Access.FRESH)
                    cache.release(filled)
        if frames is None:
            cache.borrow(self._occupied)
        else:
            frames.occupied = self._occupied
        self._step(measured=True)
        first = self._peaks()
        cache.ledger.reset_peaks()
        if frames is not None:
            frames.peak = frames.used + frames.reserved
        for _ in range(1, STEPS - 1):
            self._step()
        before = self._totals()
        start = cache.now
        updated, self._compute = self._updater.seconds, 0.0
        self._step(patience)
        settled = self._peaks()
        after = self._totals()
        difference = {name: after[name] - before[name] for name in after}
        links = ["disk read", "disk write"] if cache.disk is not None else []
        links += ["device in", "device out"] if frames is not None else []
        return Outcome(
            seconds=cache.now - start,
            compute=self._compute,
            update=self._updater.seconds - updated,
            waited={link: difference[f"waited {link}"] for link in (*links, "update")},
            busy={link: difference[f"busy {link}"] for link in links},
            moved={link: round(difference[f"moved {link}"]) for link in links},
            peak={tier: max(first[tier], settled[tier]) for tier in first},
            settled=settled,
        )

    def _peaks(self) -> dict[str, int]:
        found = {"host": self._cache.ledger.peak("host")}
        if self._cache.disk is not None:
            found["disk"] = self._cache.ledger.peak("disk")
        if self._frames is not None:
            found["device"] = self._frames.peak
        return found

    def _totals(self) -> dict[str, float]:
        found: dict[str, float] = {f"waited {link}": s for link, s in self._cache.waited.items()}
        disk, frames = self._cache.disk, self._frames
        if disk is not None:
            for index, link in enumerate(("disk read", "disk write")):
                found[f"moved {link}"] = disk.moved[index]
                found[f"busy {link}"] = disk.busy[index]
        if frames is not None:
            found |= {f"waited {link}": s for link, s in frames.waited.items()}
            for link, server in (("device in", frames.link_in), ("device out", frames.link_out)):
                found[f"moved {link}"] = server.moved
                found[f"busy {link}"] = server.busy
        return found

    def _step(self, patience: float = math.inf, *, measured: bool = False) -> None:
        end = self._cache.now + patience
        for turn in range(self._accumulate):
            self._cache.lap(("forward", bool(self._jobs)))
            self._lap(turn, measured and turn == 0)
            if self._cache.now > end:
                raise SlowError
        if self._frames is not None:
            self._frames.synchronize()
        self._begin()

    def _begin(self) -> None:
        """The updates of a step are due."""
        self._jobs = {}
        for unit, stores in enumerate(self._stores):
            jobs = [
                self._job(("update", unit, run, k), gradient, written, s.parts[k])
                for run, s in enumerate(stores)
                for k, (gradient, written) in enumerate(s.updates(self._accumulate > 1))
                if gradient.residence is not Residence.EMPTY  # one that no micro-batch came to
            ]
            if jobs:
                self._jobs[unit] = jobs
                if self._frames is not None:
                    frame = self._frames.frames[unit]
                    self._frames.free(frame)
                    frame.updates = jobs
        self._updater.begin([job for jobs in self._jobs.values() for job in jobs])
        if self.updates_at_once:
            self._settle(tuple(self._jobs))
        if self._frames is not None:
            self._frames.look_ahead()

    def _job(self, key: Hashable, gradient: Piece, written: Sequence[Piece], parts: int) -> Job:
        nbytes = gradient.nbytes + 2 * sum(piece.nbytes for piece in written)
        seconds = nbytes / self._machine.update + parts * self._machine.update_turn
        seconds += self._cache.use * (1 + len(written))
        return Job(gradient, written, key, seconds)

    def _settle(self, units: Sequence[int]) -> None:
        """The units are about to be used: their updates must be done."""
        for unit in units:
            jobs = self._jobs.pop(unit, None)
            if jobs is None:
                continue
            self._updater.settle(jobs)

    def _lap(self, turn: int, measured: bool) -> None:
        """One forward and backward."""
        cache, frames = self._cache, self._frames
        holder = cache if frames is None else frames
        if measured and not self._roomy:
            holder.hold_idle(False)
        window = -1
        for number, (span, seconds) in enumerate(zip(self._trace.spans, self._seconds, strict=True)):
            phase, unit = span.event
            if phase not in WITHIN:
                window += 1
                now, ahead = self._profile.around(window)
                if measured:  # the gauge keeps some more, and never less than it had
                    now = ahead = max(holder.reserved, self._measured(span.peak, holder))
                holder.reserve(now, ahead)
            if phase in ("forward", "backward"):
                self._settle([unit] if phase == "forward" else tuple(self._jobs))
                cache.tick(span.event, self._needs(number, turn))
                if frames is None:
                    cache.bring(self._parameters(unit))
                else:
                    frames.open(unit)
                self._recall(number)
            elif phase == "closed":
                if frames is None:
                    cache.release(self._parameters(unit))
                else:
                    frames.close(unit)
                cache.discard(self._saved.dropped.get(number, ()))
            elif phase == "arrives":
                self._gather(unit, turn)
            elif phase == "gradient":
                self._gradients(unit, turn)
            self._spend(seconds)
            self._offload(number)
        holder.reserve(0, 0)
        holder.hold_idle(True)

    def _needs(self, number: int, turn: int) -> list[Piece]:
        """What a forward or a backward uses. Gradients are where those of the passes before left them."""
        phase, unit = self._trace.spans[number].event
        needs = self._parameters(unit)
        if phase == "backward":
            needs += self._saved.read.get(number, [])
            needs += [p for s in self._stores[unit] for p in (s.totals if turn > 1 else s.gradients)]
        return needs

    def _offload(self, number: int) -> None:
        """Store what blocks offload in a span, and begin to make room for as much."""
        stored = self._saved.stored.get(number, [])
        for piece in stored:
            self._cache.bring((piece,), Access.FRESH)
            if self._frames is not None:
                self._frames.link_out.send(piece.nbytes, self._cache.now)
            self._cache.release((piece,))
        if stored:
            self._cache.make_ahead(sum(piece.nbytes for piece in stored), SOON)

    def _recall(self, number: int) -> None:
        """Bring what the backward that begins with a span reads. On a device it was lifted with the backward before."""
        for piece in self._saved.read.get(number, ()):
            self._cache.bring((piece,))
            if self._frames is not None and piece not in self._saved.here:
                self._frames.link_in.send(piece.nbytes, self._cache.now)
            self._cache.release((piece,))

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
                self._frames.buffer(s.buffer)
                self._spend(2 * s.buffer / self._machine.compute_bandwidth)  # read, and written there
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
                self._frames.send(s.buffer, s.gradients, turn == 0, partial(self._landed, s, turn))
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
            cache.bring((narrow,), Access.FRESH if first else Access.WRITE)
            cache.release((narrow,))
            return
        if turn == 1 and first and total is not narrow:
            cache.bring((narrow,))
            cache.bring((total,), Access.FRESH)
            cache.release((narrow, total))
            cache.discard((narrow,))
        cache.bring((total,), Access.WRITE)
        cache.release((total,))

    def _spend(self, seconds: float) -> None:
        self._compute += seconds
        self._cache.work(seconds, shared=True)
