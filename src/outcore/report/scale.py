"""Ways of sharding on a cluster, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from outcore.memory.ledger import TIERS
from outcore.planning.cluster import Cluster
from outcore.planning.scale import Spread
from outcore.planning.settings import said


def show_spread(console: Console, model: str, cluster: Cluster, ways: Sequence[Spread]) -> None:
    """One line for each way; memory in GB per rank, of a step with as many tokens on each rank."""
    switches = ", reduction in the switches" if cluster.in_network else ""
    table = Table(
        "way",
        title=f"{model} on {cluster.nodes} x {cluster.gpus} {cluster.machine.name} = {cluster.ranks:,} ranks{switches}",
        title_justify="left",
    )
    columns = (
        *TIERS,
        "settings",
        "step, s",
        "computes",
        "waits",
        "sent in node, GB",
        "network, GB",
        "tokens/s",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "settings" else "right")
    for way in ways:
        held = [f"{way.memory.total(tier) / 1e9:,.1f}" if way.memory.total(tier) else "" for tier in TIERS]
        turns = f" x {way.settings.accumulate}" if way.settings.accumulate > 1 else ""
        settings = f"{way.settings.micro_batch}{turns}, {said(way.settings.activations)}"
        if not way.fits:
            table.add_row(way.name, *held, settings, "does not fit")
            continue
        table.add_row(
            way.name,
            *held,
            settings,
            f"{way.seconds:.3g}",
            f"{way.compute:.3g}",
            f"{way.waited:.3g}",
            f"{way.sent['within'] / 1e9:,.2f}",
            f"{way.sent['network'] / 1e9:,.2f}",
            f"{way.tokens_per_second:,.4g}",
        )
    console.print(table)
