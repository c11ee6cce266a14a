"""``outcore inspect`` and ``outcore export``: from a checkpoint alone, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from calling import TINY, outcore, text

import outcore as library
from outcore.checkpoint import export as exporting
from outcore.checkpoint import manifest
from outcore.checkpoint.load import extra_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints of a tiny model."""
    folder = tmp_path_factory.mktemp("inspected")
    arguments = ("--data", text(folder), "--checkpoint", folder / "run", "--every", 1, "--steps", 2)
    assert outcore("train", *TINY, *arguments).exit_code == 0
    return folder / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_listed(run: Path) -> None:
    result = outcore("inspect", run / "step-2")
    assert result.exit_code == 0, result.output
    stored = library.verify(run / "step-2")
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"checkpoint  {run}/step-2", "step        2, 0 skipped"]
    assert "optimizer   AdamW, 1 parameter groups" in lines
    assert f"files       {len(stored.files)}, {stored.nbytes:,} bytes" in result.stdout
    assert lines[4] == f"tensors     {len(stored.pieces())}"
    assert len(lines) == 5 + len(stored.pieces())
    row = next(line.split() for line in lines if line.endswith("  transformer.wte.weight"))
    shape = stored.parameters["transformer.wte.weight"].value.shape
    assert row == [
        "F32",
        f"[{shape[0]},",
        f"{shape[1]}]",
        f"{4 * shape[0] * shape[1]:,}",
        "transformer.wte.weight",
    ]
    assert any(line.endswith("  exp_avg_sq:transformer.wte.weight") for line in lines)


def test_a_series_is_listed(run: Path) -> None:
    result = outcore("inspect", run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "1"], ["step", "2"]]
    assert all(line.endswith("files are whole") for line in lines)


def test_each_piece_is_verified(copy: Path) -> None:
    result = outcore("inspect", copy / "step-2", "--verify")
    assert result.exit_code == 0, result.output
    stored = library.verify(copy / "step-2")
    assert result.stdout.count("  ok  ") == len(stored.pieces())
    flip(copy / "step-2" / "parameters-00001.safetensors")
    flip(copy / "step-2" / "moments-00001.safetensors")
    assert outcore("inspect", copy / "step-2").exit_code == 0
    result = outcore("inspect", copy / "step-2", "--verify")
    assert result.exit_code == 1
    assert result.stdout.count("  damaged  ") == 2
    assert f"2 of {len(stored.pieces())} tensors in {copy}/step-2 are damaged" in result.stderr


def test_a_series_is_verified(copy: Path) -> None:
    assert [line[-2:] for line in outcore("inspect", copy, "--verify").stdout.splitlines()] == ["ok", "ok"]
    flip(copy / "step-1" / "moments-00001.safetensors")
    (copy / "step-2" / "state-00001.safetensors").unlink()
    result = outcore("inspect", copy, "--verify")
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert "is damaged: the bytes of" in first
    assert "is missing" in second
    assert "2 of 2 checkpoints" in result.stderr


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    for command in (("inspect", tmp_path), ("export", tmp_path, tmp_path / "out")):
        result = outcore(*command)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"outcore: error: {tmp_path} is no checkpoint and holds none")
        assert result.stderr.count("\n") == 1


def test_control_characters_of_names_do_not_reach_the_terminal(copy: Path) -> None:
    path = copy / "step-2" / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    body["buffers"]["\x1b[2Jname\n"] = body["parameters"]["transformer.ln_f.weight"]
    path.write_bytes(manifest.seal(body))
    result = outcore("inspect", copy / "step-2")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "\\x1b[2Jname\\n" in result.stdout


@pytest.mark.parametrize(("shards", "dtype"), [(1, "bf16"), (3, "fp32")])
def test_an_export_is_loaded_by_transformers_alone(
    run: Path, tmp_path: Path, shards: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    if shards > 1:
        monkeypatch.setattr(exporting, "SHARD_BYTES", 300_000)
    result = outcore("export", run, tmp_path / "out", "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert f"{run}/step-2 written to" in result.stdout
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == shards
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    stored = masters(run / "step-2")
    assert model.dtype is (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert model.config.use_cache
    assert {name for name, _ in model.named_parameters()} == stored.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].to(parameter.dtype)), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("the cat").input_ids) == "the cat"
    generated = outcore("generate", "--model", tmp_path / "out", "--prompt", "the cat", "--max-new-tokens", 3)
    assert generated.exit_code == 0, generated.output
    assert generated.stdout.startswith("the cat")


def masters(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for file in sorted(path.glob("parameters-*")) for k, v in load_file(file).items()}


def test_an_export_never_replaces_anything(run: Path, tmp_path: Path) -> None:
    result = outcore("export", run, tmp_path)
    assert result.exit_code == 2
    assert "exists already" in result.stderr


def test_a_damaged_checkpoint_is_not_exported(copy: Path, tmp_path: Path) -> None:
    flip(copy / "step-2" / "parameters-00001.safetensors")
    result = outcore("export", copy / "step-2", tmp_path / "out")
    assert result.exit_code == 1
    assert "is damaged" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_checkpoint_of_a_loop_of_ones_own_needs_a_model(run: Path, tmp_path: Path) -> None:
    from outcore.integrations.transformers import build

    built = build("gpt2-tiny", training=True)
    library.offload(built.model, budget=library.Budget(host="256MiB"))
    library.save(tmp_path / "own", built.model)
    library.release(built.model)
    result = outcore("export", tmp_path / "own", tmp_path / "out")
    assert result.exit_code == 2
    assert "give --model with a directory that has its config.json" in result.stderr
    assert outcore("export", tmp_path / "own", tmp_path / "out", "--model", "gpt2-tiny").exit_code == 0
    assert (tmp_path / "out" / "config.json").is_file()
    result = outcore("export", tmp_path / "own", tmp_path / "other", "--model", "gpt2")
    assert result.exit_code == 2
    assert "has no parameter 'transformer.h.10.attn.c_attn.bias': it is of another model" in result.stderr
    built.config.n_positions += 1
    built.config.save_pretrained(tmp_path / "longer")
    outcore("export", tmp_path / "own", tmp_path / "weights", "--model", "gpt2-tiny")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "longer" / "model.safetensors")
    result = outcore("export", tmp_path / "own", tmp_path / "other", "--model", tmp_path / "longer")
    assert result.exit_code == 2
    assert "transformer.wpe.weight: the checkpoint has shape [128, 64], the model [129, 64]" in result.stderr


def test_names_of_a_checkpoint_lead_nowhere(copy: Path, tmp_path: Path) -> None:
    path = copy / "step-2" / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    body["extra"]["tokenizer"] |= {"../evil.json": "{}", "/tmp/evil.json": "{}", "model.safetensors": "x"}
    path.write_bytes(manifest.seal(body))
    assert "../evil.json" in extra_of(copy / "step-2")["tokenizer"]
    assert outcore("export", copy, tmp_path / "out").exit_code == 0
    assert not (tmp_path / "evil.json").exists()
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_for_torch_has_the_optimizer_and_each_name_of_a_tied_weight(
    run: Path, tmp_path: Path
) -> None:
    from torch.distributed import checkpoint as dcp

    result = outcore("export", run, tmp_path / "out", "--format", "dcp")
    assert result.exit_code == 0, result.output
    stored = masters(run / "step-2")
    names = ("transformer.wte.weight", "lm_head.weight")
    state = {
        "model": {name: torch.empty_like(stored[names[0]]) for name in names},
        "optim": {"param_groups": [{"lr": 0}]},
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(state["model"][name], stored[names[0]]) for name in names)
    assert state["optim"] == {"param_groups": [{"lr": 6e-4}]}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--format", "zip"), "unknown format 'zip'; choose hf or dcp"),
        (("--format", "dcp", "--dtype", "bf16"), "--dtype has no meaning with --format dcp"),
        (("--dtype", "int3"), "unknown precision 'int3'"),
    ],
)
def test_bad_values_of_an_export(run: Path, tmp_path: Path, more: tuple[str, ...], expected: str) -> None:
    result = outcore("export", run, tmp_path / "out", *more)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not (tmp_path / "out").exists()
