"""``outcore plan``: what a run will hold and how long it takes, before it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from outcore.cli import options
from outcore.cli import plan_options as own
from outcore.cli.failures import UNFIT, message, reported, say
from outcore.errors import BudgetError, SizeError, UsageError

if TYPE_CHECKING:
    from outcore.integrations.transformers import Built
    from outcore.memory.budget import Budget
    from outcore.planning.machine import Machine


def plan(
    model: own.Model = "gpt2",
    machine: own.Machine = "this",
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: own.Disk = None,
    seq_len: options.SeqLen = 1024,
    batch_size: options.BatchSize = 8,
    accumulate: options.Accumulate = 1,
    micro_batch: own.MicroBatch = None,
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = "bf16",
    activations: own.Activations = None,
    slice_rows: own.SliceRows = None,
    chunk_size: own.ChunkSize = None,
    nodes: own.Nodes = 1,
    gpus_per_node: own.GpusPerNode = 1,
    in_network_reduction: own.InNetworkReduction = False,
    ranks: own.Ranks = None,
    as_json: own.AsJson = False,
) -> None:
    """Say what a run will hold on each tier and how long a step will take, without running it."""
    with reported():
        options.at_least(2, seq_len=seq_len)
        options.at_least(1, batch_size=batch_size, accumulate=accumulate, ranks=1 if ranks is None else ranks)
        options.at_least(1, nodes=nodes, gpus_per_node=gpus_per_node)
        if micro_batch is not None:
            options.at_least(1, micro_batch=micro_batch)
        if slice_rows is not None:
            options.at_least(1, microbatch=slice_rows)
        many = nodes * gpus_per_node > 1
        if in_network_reduction and not many:
            raise UsageError(
                "--in-network-reduction needs several accelerators: give --nodes or --gpus-per-node"
            )
        if many:
            _refuse_counted(ranks)
            _refuse_searched(
                {
                    "--micro-batch": micro_batch,
                    "--activations": activations,
                    "--microbatch": slice_rows,
                    "--chunk-size": chunk_size,
                }
            )
            where, _ = _machine(machine, device_memory, host_memory, disk or [])
            _across(
                model,
                (where, nodes, gpus_per_node, in_network_reduction),
                seq_len=seq_len,
                batch_size=batch_size,
                accumulate=accumulate,
                optimizer=optimizer,
                precision=precision,
                as_json=as_json,
            )
            return
        try:
            _run(
                model,
                *_machine(machine, device_memory, host_memory, disk or []),
                seq_len=seq_len,
                batch_size=batch_size,
                accumulate=accumulate,
                micro_batch=micro_batch,
                optimizer=optimizer,
                precision=precision,
                activations=activations or (None if slice_rows is None else "recompute"),
                slice_rows=slice_rows,
                chunk_size=chunk_size,
                ranks=1 if ranks is None else ranks,
                as_json=as_json,
            )
        except BudgetError as error:
            if as_json:
                found = {"tier": error.tier, "needed": error.needed, "budget": error.budget}
                typer.echo(json.dumps({"fits": False, **found, "remedy": error.remedy}, indent=1))
            say(message(error))
            raise typer.Exit(UNFIT) from None


def _refuse_counted(ranks: int | None) -> None:
    """
    Raises:
        UsageError: ranks are given where a cluster has them.
    """
    if ranks is not None:
        raise UsageError(
            "--ranks is for the table of one machine: leave it out where --nodes and --gpus-per-node count them"
        )


def _refuse_searched(given: Mapping[str, object]) -> None:
    """Settings that are searched on a cluster.

    Args:
        given: by option; ``None`` where it was left out.

    Raises:
        UsageError: one was named.
    """
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} is searched for each way of sharding: leave it out")


def _run(
    name: str,
    machine: Machine,
    budget: Budget,
    *,
    seq_len: int,
    batch_size: int,
    accumulate: int,
    micro_batch: int | None,
    optimizer: str,
    precision: str,
    activations: str | None,
    slice_rows: int | None,
    chunk_size: str | None,
    ranks: int,
    as_json: bool,
) -> None:
    import outcore
    from outcore.cli.recipes import make, recipe
    from outcore.model.policies import read_activations
    from outcore.report.console import make_console
    from outcore.report.plans import show

    found = recipe(optimizer)
    wanted = outcore.Precision(precision)  # type: ignore[arg-type]
    kept = None if activations is None else read_activations(activations, slice_rows)
    built, batch = _shaped(name, batch_size, seq_len)
    made = outcore.plan(
        built.model,
        make(found, built.model.parameters(), 1e-4),
        batch=batch,
        machine=machine,
        budget=budget,
        precision=wanted,
        activations=kept,
        accumulate=accumulate,
        micro_batch=micro_batch,
        chunk_size=chunk_size,
        ranks=ranks,
    )
    if as_json:
        typer.echo(json.dumps({"fits": True, "name": name, **made.as_dict()}, indent=1))
        return
    console = make_console()
    if not console.is_terminal:
        console.width = 150
    show(console, name, made)


def _shaped(name: str, batch_size: int, seq_len: int) -> tuple[Built, dict[str, Any]]:
    """A model without bytes, and a batch for it."""
    import torch

    from outcore.integrations.shapes import shape

    built = shape(name)
    if built.positions is not None and seq_len > built.positions:
        raise UsageError(f"--seq-len is {seq_len}, but {name} has {built.positions} positions")
    ids = torch.empty((batch_size, seq_len), dtype=torch.long, device="meta")
    return built, {"input_ids": ids, "labels": ids}


def _across(
    name: str,
    where: tuple[Machine, int, int, bool],
    *,
    seq_len: int,
    batch_size: int,
    accumulate: int,
    optimizer: str,
    precision: str,
    as_json: bool,
) -> None:
    """Each way of sharding on a cluster."""
    import outcore
    from outcore.cli.recipes import make, recipe
    from outcore.planning.cluster import Cluster
    from outcore.planning.scale import spread
    from outcore.planning.subject import Subject
    from outcore.report.console import make_console
    from outcore.report.scale import show_spread

    cluster = Cluster(*where)
    found = recipe(optimizer)
    wanted = outcore.Precision(precision)  # type: ignore[arg-type]
    built, batch = _shaped(name, batch_size, seq_len)
    made = make(found, built.model.parameters(), 1e-4)
    subject = Subject(built.model, made, batch, precision=wanted, on_host=False)
    ways = spread(subject, cluster, accumulate)
    if as_json:
        typer.echo(json.dumps({"name": name, "ways": [way.as_dict() for way in ways]}, indent=1))
    else:
        console = make_console()
        if not console.is_terminal:
            console.width = 150
        show_spread(console, name, cluster, ways)
    if not any(way.fits for way in ways):
        say("no way fits: use more ranks, a smaller batch, or a node with more memory or disk")
        raise typer.Exit(UNFIT)


def _machine(name: str, device: str | None, host: str | None, disks: list[str]) -> tuple[Machine, Budget]:
    """The machine, and the budgets on it. What is said of a described machine, it has."""
    from outcore.memory.budget import Budget, DiskPath
    from outcore.memory.sizes import parse_size
    from outcore.planning.planner import machine_of
    from outcore.planning.this import this

    total = 0
    places: list[DiskPath] = []
    for text in disks:
        try:
            total += 0 if text.strip() == "0" else parse_size(text)
        except SizeError:
            places += Budget(disk=text).disks()
    if total and places:
        raise UsageError("--disk takes sizes or directories, not both")
    if name == "this":
        found = this(places[0].path if places else None)
        if not disks or (total == 0 and not places):
            found = found.sized(disk=0)  # as outcore train: no disk is used unless one is named
    else:
        found = machine_of(name)
        found = found.sized(
            device=None if device is None else parse_size(device),
            host=None if host is None else parse_size(host),
            disk=None if not disks or places else total,
        )
    if total:
        places = [DiskPath("", total)]
    return found, Budget(device=device, host=host, disk=places or None)
