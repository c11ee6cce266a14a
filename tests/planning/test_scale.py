"""Ranks on paper: what crosses the wires, what each rank holds, and how time follows from both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from cli.calling import outcore as command
from outcore.errors import UsageError
from outcore.integrations.shapes import shape
from outcore.planning.cluster import Cluster, Fabric, Group, Move
from outcore.planning.machine import DESCRIBED
from outcore.planning.scale import Spread, simulate, spread
from outcore.planning.settings import Settings
from outcore.planning.subject import Subject
from outcore.planning.ways import WAYS
from planning.accuracy import CPU

H100 = DESCRIBED["h100"]
RECOMPUTE = outcore.Activations("recompute")


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = shape("gpt2").model
    ids = torch.empty((4, 256), dtype=torch.long, device="meta")
    return Subject(model, outcore.AdamW(model.parameters()), {"input_ids": ids, "labels": ids})


def one(subject: Subject, way: str, nodes: int, gpus: int, *, turns: int = 1, **cluster: Any) -> Spread:
    settings = Settings(4 // turns, turns, RECOMPUTE, 32 << 20)
    machine = cluster.pop("machine", H100)
    return simulate(subject, Cluster(machine, nodes, gpus, **cluster), way, settings)


@pytest.fixture(scope="module")
def untied() -> Subject:
    """Units that are used once in forward and once in backward."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40)))
    return Subject(model, outcore.AdamW(model.parameters()), {"input": torch.empty(4, 256)})


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (8, 8), (512, 8), (64, 1)])
def test_the_wires_carry_the_lower_bound(untied: Subject, nodes: int, gpus: int) -> None:
    """ZeRO-3 gathers twice and reduces once; a unit that is used twice in a row is not gathered anew."""
    p = 2 * untied.facts.parameters
    moved = one(untied, "ZeRO-3", nodes, gpus).sent
    bound = {"within": 3 * p * (gpus - 1) / gpus, "network": 3 * p / gpus * (nodes - 1) / nodes}
    for level, nbytes in bound.items():
        assert nbytes * 0.98 <= moved[level] <= nbytes
    plain = one(untied, "data parallel", nodes, gpus).sent
    assert plain["network"] == pytest.approx(2 * p / gpus * (nodes - 1) / nodes, rel=0.01)
    assert one(untied, "ZeRO-2", nodes, gpus).sent["network"] == pytest.approx(plain["network"], rel=0.01)


def test_outcore_moves_no_more_than_zero_3_and_gathers_once_for_all_slices(subject: Subject) -> None:
    accumulated = one(subject, "ZeRO-3", 4, 8, turns=4)
    sliced = simulate(
        subject, Cluster(H100, 4, 8), "outcore", Settings(4, 1, outcore.Activations("recompute", 1), 32 << 20)
    )
    whole = one(subject, "ZeRO-3", 4, 8)
    assert sliced.sent["network"] == pytest.approx(whole.sent["network"], rel=0.01)
    assert accumulated.sent["network"] > 3.5 * sliced.sent["network"]


def test_states_per_rank_fall_with_the_ranks(subject: Subject) -> None:
    p = subject.facts.parameters
    kinds = ("parameters", "gradients", "master weights", "moments")

    def held(way: str, tier: str, nodes: int) -> float:
        tiers = one(subject, way, nodes, 8).memory.tiers
        return sum(tiers[tier].get(kind, 0) for kind in kinds) / p

    for nodes in (1, 16):
        ranks = 8 * nodes
        assert held("data parallel", "device", nodes) == pytest.approx(16)
        assert held("ZeRO-1", "device", nodes) == pytest.approx(4 + 12 / ranks)
        assert held("ZeRO-2", "device", nodes) == pytest.approx(2 + 14 / ranks)
        assert held("ZeRO-3", "device", nodes) == pytest.approx(16 / ranks)
        assert held("hybrid", "device", nodes) == pytest.approx(16 / 8)
        assert held("outcore", "device", nodes) == 0
        assert held("outcore", "host", nodes) == pytest.approx(14 / ranks)


def test_a_switch_that_reduces_halves_the_all_reduce() -> None:
    plain, switched = (Group(64, 8, aided).all_reduce(8e9) for aided in (False, True))
    assert switched.network_out == pytest.approx(plain.network_out / 2, rel=0.02)
    gathered = Group(64, 8, True).all_gather(8e9)
    assert gathered.network_out < 0.02 * gathered.network_in
    scattered = Group(64, 8, True).reduce_scatter(8e9)
    assert (scattered.network_out, scattered.network_in) == (gathered.network_in, gathered.network_out)


def test_directions_work_side_by_side_and_one_after_the_other() -> None:
    fabric = Fabric(replace(H100, in_node=1.0, network=1.0))
    assert fabric.start(Move(network_out=2.0), 0.0) == 2.0
    assert fabric.start(Move(network_in=3.0), 0.0) == 3.0
    assert fabric.start(Move(network_in=1.0, network_out=1.0, node_out=9.0), 1.0) == 10.0
    assert fabric.start(Move(latency=5.0), 1.0) == 1.0


def test_a_slow_network_is_waited_for_and_hybrid_avoids_it(subject: Subject) -> None:
    slow = replace(H100, network=1e9)
    sharded, hybrid, aided = (
        one(subject, "ZeRO-3", 64, 8, machine=slow),
        one(subject, "hybrid", 64, 8, machine=slow),
        one(subject, "ZeRO-3", 64, 8, machine=slow, in_network=True),
    )
    assert sharded.seconds > sharded.compute * 1.5
    assert hybrid.seconds < sharded.seconds
    assert aided.seconds < sharded.seconds
    for way in WAYS:
        found = one(subject, way, 64, 8, machine=slow)
        assert found.seconds >= max(found.compute, found.sent["network"] / slow.network) * 0.999


def test_a_step_takes_as_long_for_many_as_for_few_and_is_simulated_as_fast(subject: Subject) -> None:
    few, many = (one(subject, "ZeRO-3", nodes, 8) for nodes in (8, 512))
    assert many.ranks == 4096
    assert many.seconds == pytest.approx(few.seconds, rel=0.1)
    assert many.tokens == 64 * few.tokens
    assert one(subject, "ZeRO-3", 512, 8) == many


def test_what_exceeds_the_host_goes_to_disk_and_costs_time(subject: Subject) -> None:
    tight = one(subject, "outcore", 1, 8, machine=H100.sized(host=1 << 30))
    roomy = one(subject, "outcore", 1, 8)
    assert tight.memory.total("disk") > 0 == roomy.memory.total("disk")
    assert tight.seconds > roomy.seconds
    none = one(subject, "outcore", 1, 8, machine=H100.sized(host=1 << 30, disk=0))
    assert not none.fits
    assert none.tokens_per_second == 0


def test_every_way_is_searched(subject: Subject) -> None:
    found = spread(subject, Cluster(H100, 2, 8))
    assert [way.name for way in found] == list(WAYS)
    assert all(way.fits for way in found)
    small = spread(subject, Cluster(H100.sized(device=1 << 30), 2, 8))
    assert not small[0].fits
    assert small[0].settings.micro_batch == 1
    assert small[-1].fits


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ((H100, 0, 8), "at least 1"),
        ((H100, 1024, 8), "4,096 GPUs at most"),
        ((CPU, 2, 1), "has no accelerator"),
        ((replace(H100, network=0.0), 2, 8), "state in_node and network"),
    ],
)
def test_what_is_no_cluster_is_refused(cluster: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Cluster(*cluster)


def test_an_unknown_way_is_refused(subject: Subject) -> None:
    with pytest.raises(UsageError, match=r"unknown way 'ZeRO-4': choose from data parallel, ZeRO-1"):
        spread(subject, Cluster(H100, 2, 8), ways=["ZeRO-3", "ZeRO-4"])
    with pytest.raises(UsageError, match="unknown way 'zero-3'"):
        one(subject, "zero-3", 2, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--microbatch", 4), "--microbatch is searched"),
        (("--activations", "keep", "--microbatch", 4), "--activations is searched"),
        (("--chunk-size", "8MiB"), "--chunk-size is searched"),
        (("--ranks", 2), "--ranks is for the table of one machine"),
    ],
)
def test_the_command_refuses_what_it_would_not_heed(arguments: tuple[object, ...], said: str) -> None:
    done = command("plan", "--model", "gpt2-tiny", "--machine", "h100", "--nodes", 2, *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"outcore: error: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_the_command_compares_the_ways() -> None:
    common = ("plan", "--model", "gpt2-tiny", "--machine", "h100", "--seq-len", 64, "--batch-size", 2)
    done = command(*common, "--nodes", 4, "--gpus-per-node", 8, "--in-network-reduction")
    assert done.exit_code == 0, done.output
    assert "32 ranks, reduction in the switches" in done.output
    assert all(way in done.output for way in WAYS)
    done = command(*common, "--nodes", 512, "--gpus-per-node", 8, "--json")
    found = json.loads(done.output)
    assert [way["ranks"] for way in found["ways"]] == [4096] * len(WAYS)
    assert command(*common, "--in-network-reduction").exit_code == 2
    assert command(*common, "--nodes", 2, "--micro-batch", 1).exit_code == 2
    assert command(*common, "--nodes", 2, "--device-memory", "1MiB").exit_code == 3
