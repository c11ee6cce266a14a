"""``outcore generate`` writes what plain ``generate`` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from calling import outcore, text

from outcore.cli.files import Texts
from outcore.cli.tokens import Trained

PROMPT = "the cat sat on"


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, saved as Hugging Face does."""
    import transformers

    folder = tmp_path_factory.mktemp("model")
    backend = Trained(Texts.find([str(text(folder))]), 320).backend
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    if request.param == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=320, n_layer=2, n_embd=48, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    else:
        config = transformers.LlamaConfig(
            vocab_size=320,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    path = folder / "saved"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def plain(directory: Path, count: int) -> str:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(
        ids.input_ids, attention_mask=ids.attention_mask, max_new_tokens=count, do_sample=False
    )
    return tokenizer.decode(out[0], skip_special_tokens=True)


@pytest.mark.parametrize("memory", [(), ("--host-memory", "2MiB")])
def test_the_same_text_as_plain_generate(directory: Path, memory: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ("--model", directory, "--prompt", PROMPT, "--max-new-tokens", 12)
    result = outcore("generate", *arguments, *memory, "--disk", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout == plain(directory, 12) + "\n"
    assert "parameters in" in result.stderr
    assert "placement: host parameters" in " ".join(result.stderr.split())
    assert "to update; " in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_sampling_follows_the_seed(directory: Path) -> None:
    def sample(seed: int) -> str:
        arguments = ("--model", directory, "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 1)
        result = outcore("generate", *arguments, "--seed", seed)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_more_tokens_than_positions_are_refused(directory: Path) -> None:
    result = outcore("generate", "--model", directory, "--prompt", PROMPT, "--max-new-tokens", 64)
    assert result.exit_code == 2
    assert "64 positions" in result.stderr


def test_an_empty_prompt_is_refused(directory: Path) -> None:
    result = outcore("generate", "--model", directory, "--prompt", "")
    assert result.exit_code == 2
    assert "no tokens" in result.stderr


def test_several_prompts_are_one_batch(directory: Path, tmp_path: Path) -> None:
    """In fp32, where the last bits that other shapes change decide nothing, each gets the text it gets alone."""
    prompts = ["the cat", "a dog ran to the sea, and", "we"]
    common = ("--model", directory, "--max-new-tokens", 8, "--precision", "fp32")
    file = tmp_path / "prompts.txt"
    file.write_text(f"{prompts[1]}\n\n{prompts[2]}\n", encoding="utf-8")
    together = outcore("generate", *common, "--prompt", prompts[0], "--prompt-file", file)
    assert together.exit_code == 0, together.output
    found = [json.loads(line) for line in together.stdout.splitlines()]
    assert [line["prompt"] for line in found] == prompts
    for line in found:
        alone = outcore("generate", *common, "--prompt", line["prompt"])
        assert alone.stdout == line["text"] + "\n"


def test_what_is_guessed_from_the_text_changes_no_token(directory: Path) -> None:
    arguments = ("--model", directory, "--prompt", PROMPT, "--max-new-tokens", 24, "--precision", "fp32")
    guessed = outcore("generate", *arguments, "--lookup", 4)
    assert guessed.exit_code == 0, guessed.output
    assert guessed.stdout == outcore("generate", *arguments).stdout


def test_prompts_that_can_not_be_used_are_refused(directory: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ((), "--prompt"),
        (("--prompt-file", tmp_path / "none.txt"), "can't be read"),
        (("--prompt", "a", "--prompt", "b", "--lookup", 3), "single prompt"),
    ):
        result = outcore("generate", "--model", directory, *arguments)
        assert result.exit_code == 2, arguments
        assert said in result.stderr
