"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from outcore.memory.ledger import TIERS
from outcore.memory.sizes import format_size
from outcore.planning.plan import Plan, parts
from outcore.planning.settings import said
from outcore.planning.strategies import KINDS
from outcore.report.console import show_plan


def show(console: Console, model: str, plan: Plan) -> None:
    """The settings, the tiers, the step, and every strategy's memory."""
    show_plan(console, dict(_settings(model, plan)))
    console.print()
    console.print(_tiers(plan))
    console.print(_step(plan))
    console.print(_strategies(plan))


def _settings(model: str, plan: Plan) -> Iterator[tuple[str, str]]:
    facts, out = plan.facts, plan.outcome
    frozen = (
        f", {facts.parameters - facts.trained:,} of them frozen" if facts.trained < facts.parameters else ""
    )
    tied = f", {facts.shared} tied" if facts.shared else ""
    yield (
        "model",
        f"{model}: {facts.parameters:,} parameters{frozen}{tied} in {len(facts.units)} units, the largest "
        f"{facts.largest.name} with {facts.largest.parameters:,}",
    )
    measured = f", measured {plan.machine.date}" if plan.machine.date else ", as described"
    yield "machine", f"{plan.machine.name}{measured}"
    turns = f" x {plan.accumulate}" if plan.accumulate > 1 else ""
    yield (
        "settings",
        f"micro-batches of {plan.micro_batch}{turns}, activations {said(plan.activations)}, "
        f"{plan.precision.compute}, chunks of {format_size(plan.chunk_bytes)}; the fastest of {plan.tried} simulated",
    )
    yield (
        "step",
        f"{plan.tokens:,} tokens in {figure(out.seconds)} s: {_speed(plan.tokens_per_second)} tokens/s, "
        f"{plan.flops / out.seconds / 1e12:.3g} TFLOP/s",
    )
    yield (
        "limit",
        f"{plan.bottleneck}: no step here takes less than {figure(plan.floor)} s, this one takes "
        f"{out.seconds / plan.floor:.2f} of that"
        if plan.floor
        else plan.bottleneck,
    )
    if plan.break_even > plan.tokens:
        yield "break-even", f"{plan.break_even:,} tokens per step until computing hides the rest"
    if plan.written_per_day:
        years = plan.disk_years
        life = "" if years is None else f"; its maker warrants {lifetime(years)} of that"
        yield "wear", f"{plan.written_per_day / 1e12:,.3g} TB written to disk per day{life}"


def _tiers(plan: Plan) -> Table:
    table = Table("tier", title="what each tier holds", title_justify="left")
    for name in ("peak", "after the first step", "budget", "least budget"):
        table.add_column(name, justify="right")
    for tier in TIERS:
        if tier not in plan.outcome.peak:
            continue
        row = (
            plan.outcome.peak[tier],
            plan.outcome.settled[tier],
            getattr(plan.limits, tier),
            getattr(plan.least, tier),
        )
        table.add_row(tier, *(format_size(nbytes or 0) for nbytes in row))
    return table


def _step(plan: Plan) -> Table:
    """Seconds of each part: how long it works, and how long training stands still for it."""
    table = Table("part", title="a step", title_justify="left")
    for name in ("works, s", "training waits, s", "moves"):
        table.add_column(name, justify="right")
    out = plan.outcome
    for part, seconds in parts(out).items():
        links = [link for link in out.moved if link == part or link.startswith(f"{part} ")]
        waits = sum(out.waited.get(link, 0.0) for link in links)
        moved = sum(out.moved[link] for link in links)
        table.add_row(
            part,
            figure(seconds),
            figure(waits) if links else "",
            format_size(moved) if links else "",
        )
    table.add_row("in all", figure(out.seconds), "", "")
    return table


def _strategies(plan: Plan) -> Table:
    whose = f"per rank of {plan.ranks}" if plan.ranks > 1 else "on one rank"
    table = Table(
        "strategy", "tier", title=f"memory of each strategy, {whose}, at its peak, GB", title_justify="left"
    )
    for kind in (*KINDS, "in all"):
        table.add_column(kind, justify="right")
    table.add_column("fits")
    for row in plan.table:
        name, fits = row.name, "yes" if row.fits else "no"
        for tier in TIERS:
            if not row.total(tier):
                continue
            kinds = row.tiers[tier]
            cells = (_gigabytes(kinds.get(kind, 0)) for kind in KINDS)
            table.add_row(name, tier, *cells, _gigabytes(row.total(tier)), fits)
            name = fits = ""
    return table


def _gigabytes(nbytes: int) -> str:
    return "" if nbytes == 0 else figure(nbytes / 1e9) if nbytes >= 1e6 else "<0.001"


def figure(value: float) -> str:
    """Three digits that count, or all of a large number; no exponent."""
    if 0 < value < 0.0001:
        return "<0.0001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def lifetime(years: float) -> str:
    """Years in words; days where it is less than one."""
    return f"{figure(years)} years" if years >= 1 else f"{years * 365:.0f} days"
