"""``outcore train`` from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from calling import TINY, metrics, outcore, text

from outcore.cli.recipes import RECIPES

STEPS = 3


def train(folder: Path, name: str, *more: object) -> str:
    """Train a few steps and return what was printed."""
    data = folder / "words.txt"
    if not data.exists():
        text(folder)
    arguments = ("--data", data, "--log-dir", folder / name, "--steps", STEPS, *more)
    result = outcore("train", *TINY, *arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def losses(log: Path) -> list[float]:
    return [line["loss"] for line in metrics(log)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with a tight host and a disk, and what it printed."""
    folder = tmp_path_factory.mktemp("done")
    return folder / "log", train(folder, "log", "--host-memory", "3MiB", "--disk", folder)


def test_every_step_has_a_line(done: tuple[Path, str]) -> None:
    lines = metrics(done[0])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert 0 < line["loss"] < 20
        assert line["lr"] == 6e-4
        assert line["grad_norm"] > 0
        assert line["tokens"] == 64
        assert line["skipped"] == 0
        assert line["nonfinite"] is None
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        for tier, budget in line["budget"].items():
            assert line["held"][tier] <= line["peak"][tier] <= budget
        whole = line["compute"] + line["update"] + sum(line["waited"].values())
        assert whole == pytest.approx(line["seconds"])
        assert line["moved"]["disk read"] > 0


def test_the_loss_falls_from_that_of_chance(done: tuple[Path, str]) -> None:
    found = losses(done[0])
    assert found[0] == pytest.approx(math.log(2048), abs=0.2)
    assert found[-1] < found[0]


def test_the_loss_is_not_rounded(done: tuple[Path, str]) -> None:
    assert any(len(str(loss)) > 10 for loss in losses(done[0]))


def test_the_plan_and_the_end_are_printed(done: tuple[Path, str]) -> None:
    for said in (
        "239,360 parameters",
        "new weights from seed 0",
        "2 x 32 tokens = 64 tokens",
        "adamw, learning rate 0.0006, gradient clipped to norm 1",
        "bf16 on cpu, activations: recompute",
        "3.0 MiB budget",
        "step 1/3",
        "step 3/3",
        "loss  first",
        "peak of each tier",
        "disk write",
        "waiting for disk read",
        "update",
    ):
        assert said in done[1]


def test_the_tokenizer_is_kept(done: tuple[Path, str]) -> None:
    from tokenizers import Tokenizer

    kept = Tokenizer.from_file(str(done[0] / "tokenizer.json"))
    assert kept.get_vocab_size() <= 2048
    assert kept.decode(kept.encode("the cat").ids) == "the cat"


def test_tensorboard_has_the_losses(done: tuple[Path, str]) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = event_accumulator.EventAccumulator(str(done[0]))
    board.Reload()
    found = [event.value for event in board.Scalars("loss")]
    assert found == pytest.approx(losses(done[0]))
    assert "peak/host" in board.Tags()["scalars"]


def test_nothing_is_left_beside_the_log(done: tuple[Path, str]) -> None:
    assert {path.name for path in done[0].parent.iterdir()} == {"log", "words.txt"}


def test_placement_changes_no_loss(done: tuple[Path, str], tmp_path: Path) -> None:
    train(tmp_path, "log", "--host-memory", "1GiB")
    assert losses(tmp_path / "log") == losses(done[0])


def test_the_seed_changes_them(done: tuple[Path, str], tmp_path: Path) -> None:
    train(tmp_path, "log", "--seed", 1)
    assert losses(tmp_path / "log") != losses(done[0])


@pytest.mark.parametrize("name", RECIPES)
def test_each_optimizer_starts_alike_and_lowers_the_loss(
    name: str, done: tuple[Path, str], tmp_path: Path
) -> None:
    train(tmp_path, "log", "--optimizer", name)
    found = losses(tmp_path / "log")
    assert found[0] == losses(done[0])[0]
    assert found[-1] < found[0]


def test_accumulation_takes_more_tokens_per_step(tmp_path: Path) -> None:
    said = train(tmp_path, "log", "--accumulate", 4, "--batch-size", 1)
    assert "1 x 32 tokens x 4 batches = 128 tokens" in said
    assert metrics(tmp_path / "log")[0]["tokens"] == 128


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_other_precisions(precision: str, tmp_path: Path) -> None:
    train(tmp_path, "log", "--precision", precision, "--activations", "keep")
    found = losses(tmp_path / "log")
    assert found[-1] < found[0]


def test_without_clipping_there_is_no_norm(tmp_path: Path) -> None:
    assert "gradient not clipped" in train(tmp_path, "log", "--clip", 0)
    assert all(line["grad_norm"] is None for line in metrics(tmp_path / "log"))


def test_an_earlier_run_in_the_same_log_is_kept(tmp_path: Path) -> None:
    train(tmp_path, "log")
    earlier = (tmp_path / "log" / "metrics.jsonl").read_text()
    train(tmp_path, "log", "--seed", 1)
    assert (tmp_path / "log" / "metrics.jsonl.1").read_text() == earlier
    assert [line["step"] for line in metrics(tmp_path / "log")] == [1, 2, 3]


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_loss_that_is_not_finite_names_the_unit(tmp_path: Path) -> None:
    """Once: from then on every step is like it."""
    import torch
    import transformers

    settings = {"vocab_size": 512, "n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[5] = torch.nan
    model.save_pretrained(tmp_path / "model")
    arguments = ("--data", text(tmp_path), "--log-dir", tmp_path / "log", "--steps", 3, "--accumulate", 2)
    result = outcore("train", *TINY, "--model", tmp_path / "model", *arguments)
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if "loss of step" in line]
    assert said == ["outcore: warning: the loss of step 1 is not finite, first in transformer.h.1"]
    assert "step skipped: a gradient is not finite, first in " in result.stderr
    lines = metrics(tmp_path / "log")
    assert lines[0]["nonfinite"] == "transformer.h.1"
    assert all(line["nonfinite"] for line in lines)
    assert [line["skipped"] for line in lines] == [1, 2, 3]


def test_json_has_no_nan(tmp_path: Path) -> None:
    from outcore.memory.ledger import Ledger
    from outcore.report.metrics import Metrics
    from outcore.report.step import Step

    now = Ledger().snapshot()
    with Metrics(tmp_path) as file:
        file.write(Step(1, math.nan, 0.1, math.inf, 8, 0.5, now, now, 1))
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None
    assert line["grad_norm"] is None


def test_a_batch_in_slices(tmp_path: Path) -> None:
    """The same training up to rounding, and the plan says what runs in slices."""
    said = train(tmp_path, "slices", "--batch-size", 4, "--microbatch", 1)
    assert "activations: recompute in slices of 1 sequence, head and loss too" in " ".join(said.split())
    train(tmp_path, "whole", "--batch-size", 4)
    assert losses(tmp_path / "slices") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    said = train(tmp_path, "kept", "--batch-size", 4, "--microbatch", 1, "--logits", "keep")
    assert "head and loss too, logits kept" in " ".join(said.split())
    assert losses(tmp_path / "kept") == pytest.approx(losses(tmp_path / "slices"), rel=1e-3)
