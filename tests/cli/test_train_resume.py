"""``outcore train --checkpoint --resume``: a run that was cut goes on as if it had not been."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import TINY, metrics, text
from calling import outcore as call

import outcore
from outcore.cli.batches import Batches
from outcore.cli.identity import check_run
from outcore.errors import UsageError
from outcore.report.metrics import Metrics
from outcore.report.step import Step

STEPS = 7


def train(folder: Path, *more: object, data: Path | None = None) -> Any:
    """A run in ``folder`` on data beside it."""
    data = data or folder.parent / "words.txt"
    if not data.exists():
        text(data.parent)
    return call("train", *TINY, "--data", data, "--checkpoint", folder / "run", "--steps", STEPS, *more)


def good(result: Any) -> str:
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def seen(folder: Path) -> list[tuple[int, float, float]]:
    """What must not depend on where a run was cut."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(folder / "run")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never cut."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    good(train(folder))
    return folder


@pytest.fixture
def cut(whole: Path, tmp_path: Path) -> Path:
    """A run of three steps on the same data, saved at each."""
    folder = whole.parent / tmp_path.name
    good(train(folder, "--every", 1, "--keep", 3, "--steps", 3))
    return folder


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies once the line of a step is written."""
    write = Metrics.write

    def write_and_die(self: Metrics, made: Step) -> None:
        write(self, made)
        if made.number == step:
            raise RuntimeError("the power is gone")

    monkeypatch.setattr(Metrics, "write", write_and_die)


def test_a_cut_run_goes_on_to_the_bit(whole: Path, cut: Path) -> None:
    assert "going on from step-3" in good(train(cut, "--resume"))
    assert seen(cut) == seen(whole)
    assert (cut / "run" / "tokenizer.json").read_text() == (whole / "run" / "tokenizer.json").read_text()


@pytest.mark.parametrize("placement", [("--host-memory", "1GiB"), ("--host-memory", "3MiB", "--disk", "{}")])
def test_another_placement_goes_on_to_the_same_bits(
    whole: Path, cut: Path, placement: tuple[str, ...], tmp_path: Path
) -> None:
    good(train(cut, "--resume", *(word.format(tmp_path) for word in placement)))
    assert seen(cut) == seen(whole)
    assert weights(cut) == weights(whole)


def weights(folder: Path) -> dict[str, str]:
    """The digests of all values and moments of the last checkpoint."""
    manifest = outcore.verify(folder / "run" / f"step-{STEPS}")
    return {piece.key: piece.stretches for piece in manifest.pieces() if not piece.key.startswith("state.")}


def test_lines_of_steps_that_are_taken_again_are_not_there_twice(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = whole.parent / tmp_path.name
    with monkeypatch.context() as patch:
        crash_at(5, patch)
        assert train(folder, "--every", 2).exit_code == 1
    assert [step for step, _, _ in seen(folder)] == [1, 2, 3, 4, 5]
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # cut in the middle of a line
    said = good(train(folder, "--every", 2, "--resume"))
    assert "going on from step-4" in " ".join(said.split())  # lines are broken where a path is long
    assert seen(folder) == seen(whole)
    assert not list((folder / "run").glob("metrics.jsonl.*"))


def test_metrics_of_another_run_are_set_aside(whole: Path, cut: Path) -> None:
    path = cut / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["loss"] += 1
    other = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(other)
    good(train(cut, "--resume"))
    assert (cut / "run" / "metrics.jsonl.1").read_text() == other
    assert seen(cut) == seen(whole)[3:]


def test_each_sample_is_seen_once_across_a_crash(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the batches that count, those up to the checkpoint and those after it, no window comes twice."""
    counted: list[bytes] = []
    following = Batches.next

    def note(self: Batches) -> Any:
        rows = following(self)
        counted.extend(row.tobytes() for row in rows)
        return rows

    monkeypatch.setattr(Batches, "next", note)
    folder = whole.parent / tmp_path.name
    data = tmp_path / "numbers.txt"
    data.write_text("".join(f"{n * n} {n}\n" for n in range(4000)))  # no two windows are alike
    with monkeypatch.context() as patch:
        crash_at(5, patch)
        assert train(folder, "--every", 3, data=data).exit_code == 1
    del counted[3 * 2 :]
    good(train(folder, "--resume", data=data))
    assert len(counted) == STEPS * 2
    assert set(Counter(counted).values()) == {1}


def test_fp16_takes_its_loss_scale_along(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, stops in ((one, (6,)), (two, (2, 6))):
        for steps in stops:
            more = ("--precision", "fp16", "--optimizer", "adam", "--accumulate", 2, "--steps", steps)
            good(train(folder, "--resume", *more))
    assert seen(two) == seen(one)


def test_the_newest_are_kept(whole: Path, tmp_path: Path) -> None:
    folder = whole.parent / tmp_path.name
    good(train(folder, "--every", 2, "--keep", 3))
    assert kept(folder) == ["step-4", "step-6", "step-7"]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").iterdir() if path.is_dir())


def test_without_a_checkpoint_it_begins_and_says_so(whole: Path, tmp_path: Path) -> None:
    folder = whole.parent / tmp_path.name
    assert "there is none yet: starting from the beginning" in good(train(folder, "--resume"))
    assert seen(folder) == seen(whole)


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_damaged_checkpoint_is_passed_over_and_replaced(whole: Path, cut: Path) -> None:
    flip(cut / "run" / "step-3" / "moments-00001.safetensors")
    result = train(cut, "--resume", "--every", 3, "--keep", 3)
    assert "going on from step-2" in good(result)
    assert "a checkpoint is passed over" in result.stderr
    assert seen(cut) == seen(whole)
    outcore.verify(cut / "run" / "step-3")


def test_where_all_are_damaged_it_does_not_begin_anew(cut: Path) -> None:
    for path in (cut / "run").glob("step-*"):
        (path / "manifest.json").write_text("{}")
    result = train(cut, "--resume")
    assert result.exit_code == 1
    assert "manifest" in result.stderr
    assert len(seen(cut)) == 3


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_finished_run_has_nothing_to_do(whole: Path) -> None:
    before = seen(whole)
    assert f"at step {STEPS} of {STEPS}; give a larger --steps" in good(train(whole, "--resume"))
    assert seen(whole) == before


OTHERS = {
    "seq-len": (("--seq-len", "16"), "--seq-len was 32 and is 16 now"),
    "micro-batch": (("--microbatch", "1"), "--microbatch was None and is 1 now"),
    "batch size": (("--batch-size", "1"), "--batch-size was 2 and is 1 now"),
    "accumulation": (("--accumulate", "2"), "--accumulate was 1 and is 2 now"),
    "seed": (("--seed", "5"), "--seed was 0 and is 5 now"),
    "optimizer": (("--optimizer", "lion", "--lr", "6e-4"), "--optimizer was adamw and is lion now"),
    "learning rate": (("--lr", "1e-3"), "--lr was 0.0006 and is 0.001 now"),
    "clipping": (("--clip", "0"), "--clip was 1.0 and is 0.0 now"),
    "precision": (("--precision", "fp32"), "--precision was bf16 and is fp32 now"),
    "model": (("--model", "gpt2"), "the model's n_embd was 64 and is 768 now"),
}


def test_a_run_of_before_logits_could_be_kept_multiplied_them_again() -> None:
    model: dict[str, Any] = {"n_embd": 64}
    stored = {"model": model, "flags": {"seed": 0}}
    check_run(stored, {"model": model, "flags": {"seed": 0, "logits": "recompute"}}, Path("run"))
    with pytest.raises(UsageError, match="--logits was recompute and is keep now"):
        check_run(stored, {"model": model, "flags": {"seed": 0, "logits": "keep"}}, Path("run"))


@pytest.mark.parametrize(("arguments", "expected"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_run_is_refused(cut: Path, arguments: tuple[str, ...], expected: str) -> None:
    result = train(cut, "--resume", *arguments)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(seen(cut)) == 3


@pytest.mark.parametrize(
    ("change", "expected"), [("more\n" * 50, "tokens and has"), (None, "text of the data")]
)
def test_other_data_is_refused(cut: Path, tmp_path: Path, change: str | None, expected: str) -> None:
    data = tmp_path / "other.txt"
    words = (cut.parent / "words.txt").read_text()
    data.write_text(words + change if change else words.replace("sat", "ran", 1))
    result = train(cut, "--resume", data=data)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_checkpoint_is_never_begun_over(cut: Path) -> None:
    result = train(cut)
    assert result.exit_code == 2
    assert "holds checkpoints already, the newest of step 3: give --resume" in result.stderr
    assert len(seen(cut)) == 3


def test_a_checkpoint_of_a_loop_of_ones_own_is_refused(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 4)
    outcore.offload(model, budget=outcore.Budget(host="64MiB"))
    outcore.Checkpoints(tmp_path / "a" / "run").save(3, model)
    outcore.release(model)
    result = train(tmp_path / "a", "--resume")
    assert result.exit_code == 2
    assert "was not written by outcore train" in result.stderr


BAD = {
    "every without a place": (("--every", "5"), "--every has no meaning without --checkpoint"),
    "keep without a place": (("--keep", "5"), "--keep has no meaning without --checkpoint"),
    "resume without a place": (("--resume",), "--resume has no meaning without --checkpoint"),
    "grace without a place": (("--grace", "5"), "--grace has no meaning without --checkpoint"),
    "every step": (("--checkpoint", "{tmp}/run", "--every", "0"), "--every must be at least 1"),
    "none kept": (("--checkpoint", "{tmp}/run", "--keep", "0"), "--keep must be at least 1"),
    "no grace": (("--checkpoint", "{tmp}/run", "--grace", "0"), "--grace must be above 0"),
    "endless grace": (("--checkpoint", "{tmp}/run", "--grace", "inf"), "--grace must be above 0"),
    "a file": (("--checkpoint", "{tmp}/words.txt"), "words.txt is not a directory"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_bad_values(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    data = text(tmp_path)
    more = [argument.format(tmp=tmp_path) for argument in arguments]
    result = call("train", *TINY, "--data", data, "--log-dir", tmp_path / "log", *more)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [data]


def test_a_position_that_can_not_be_is_refused(cut: Path) -> None:
    tokens = np.arange(64)
    with pytest.raises(outcore.errors.UsageError, match="beyond"):
        Batches(tokens, 8, 1, 0).restore({"seed": 0, "epoch": 0, "position": 9})


def test_a_model_of_ones_own_with_dropout_and_its_tokenizer(tmp_path: Path) -> None:
    import torch
    import transformers

    from outcore.cli.files import Texts
    from outcore.cli.tokens import Trained

    backend = Trained(Texts.find([str(text(tmp_path))]), 320).backend
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    settings = {"vocab_size": 320, "n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    assert model.config.resid_pdrop > 0
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    runs = []
    for name, stops in (("one", (6,)), ("two", (2, 5, 6))):
        for steps in stops:
            more = ("--model", tmp_path / "model", "--activations", "recompute" if steps == 5 else "keep")
            good(train(tmp_path / name, "--resume", "--steps", steps, *more, data=tmp_path / "words.txt"))
        runs.append(seen(tmp_path / name))
    assert runs[0] == runs[1]
    assert call("export", tmp_path / "two" / "run", tmp_path / "out").exit_code == 0
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("the cat sat").input_ids == tokenizer("the cat sat").input_ids
