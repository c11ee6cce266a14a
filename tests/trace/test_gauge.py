"""What activations are given: what fits once fits again, and inputs that grow are measured anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import BudgetError, DiskFullError
from outcore.memory.ledger import Ledger
from outcore.offloaded import engine_of
from outcore.trace.gauge import MeteredGauge


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(1000, 256), *(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 20_000)
    )


def test_a_pass_that_fits_once_fits_again(tmp_path: Path) -> None:
    """The largest unit is not open when most activations are alive: their sum must not be asked for."""
    ids = torch.randint(0, 1000, (64,))
    outcomes = set()
    for mib in range(21, 40, 2):
        whole = model()
        fp32 = outcore.Precision("fp32")
        outcore.offload(whole, budget=outcore.Budget(host=f"{mib}MiB", disk=tmp_path), precision=fp32)
        with torch.no_grad():
            try:
                first = whole(ids)
            except BudgetError:
                outcomes.add("refused")
            else:
                outcomes.add("fits")
                for _ in range(3):
                    assert torch.equal(whole(ids), first)
                held = outcore.snapshot(whole)
                assert held.peak["host"] <= held.budget["host"]
        outcore.release(whole)
    assert outcomes == {"refused", "fits"}


def test_larger_inputs_are_measured_anew(tmp_path: Path) -> None:
    whole = model()
    budget = outcore.Budget(host="64MiB", disk=tmp_path)
    outcore.offload(whole, budget=budget, precision=outcore.Precision("fp32"))
    gauge = engine_of(whole).gauge
    with torch.no_grad():
        peaks = []
        for tokens in (8, 32, 16):
            whole(torch.zeros(tokens, dtype=torch.long))
            peaks.append(gauge.largest)
    assert peaks[0] >= 8 * 20_000 * 4
    assert peaks[1] >= 32 * 20_000 * 4
    assert peaks[2] == peaks[1]
    outcore.release(whole)


def test_as_many_elements_in_another_shape_are_measured_anew(tmp_path: Path) -> None:
    """Scores grow with the square of a length. A shape that was measured, or is covered by one, isn't again."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            return ((x @ x.transpose(1, 2)).softmax(-1) @ x).square().mean()

    net = Scores()
    optimizer = outcore.SGD(net.parameters())
    outcore.offload(net, optimizer, budget=outcore.Budget(host="4MiB", disk=tmp_path), precision="fp32")
    gauge = engine_of(net).gauge
    assert isinstance(gauge, MeteredGauge)
    measured = []
    for shape in ((64, 8), (1, 512), (32, 16), (64, 8), (1, 512), (1, 256), (16, 16), (64, 9)):
        optimizer.backward(net(torch.randn(*shape, 8)))
        measured.append(gauge._meter is not None)
        optimizer.step()
    assert measured == [True, True, True, False, False, False, False, True]
    with pytest.raises(BudgetError):
        net(torch.randn(1, 2048, 8))
    outcore.release(net)


def test_an_input_too_large_is_refused_and_the_next_one_runs(tmp_path: Path) -> None:
    whole = model()
    budget = outcore.Budget(host="32MiB", disk=tmp_path)
    outcore.offload(whole, budget=budget, precision=outcore.Precision("fp32"))
    with torch.no_grad():
        small = whole(torch.zeros(8, dtype=torch.long))
        with pytest.raises(BudgetError, match="activations"):
            whole(torch.zeros(1000, dtype=torch.long))
        assert torch.equal(whole(torch.zeros(8, dtype=torch.long)), small)
    outcore.release(whole)


class Full:
    """Shares a budget with activations and, while ``full``, can't make room for them."""

    pinned = 0
    full = False

    def reserve(self, nbytes: int, ahead: int) -> None:
        if self.full and nbytes:
            raise DiskFullError("no space left")

    def hold_idle(self, on: bool) -> None:
        pass


def test_what_could_not_be_set_aside_is_not_given_back() -> None:
    """The disk is full when chunks should leave: the ledger still holds what it held before, and so after the lap."""
    ledger, owner, cpu = Ledger(budget={"host": 1 << 20}), Full(), torch.device("cpu")
    gauge = MeteredGauge(cpu, "host", owner, ledger, 1 << 20, False, lambda storage: None, lambda: None)
    ledger.hold("host", 1000)

    def lap() -> None:
        gauge.begin("lap", ((8,),))
        kept = torch.ones(64)
        assert ledger.held("host") >= 1000 + kept.nbytes
        del kept
        gauge.end()
        assert ledger.held("host") == 1000

    lap()  # it is measured, and foreseen from then on
    owner.full = True
    with pytest.raises(DiskFullError):
        gauge.begin("lap", ((8,),))
    gauge.end(whole=False)
    assert ledger.held("host") == 1000
    owner.full = False
    lap()
