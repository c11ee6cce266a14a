"""Models are built without memory and come out as ``from_pretrained`` makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from outcore.errors import ModelError, UsageError
from outcore.integrations.presets import PRESETS
from outcore.integrations.transformers import build, meta_parameters

SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt2-1.3b": 1_313_626_112,
    "gpt2-tiny": 239_360,
}

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, num_attention_heads=4),
    "llama3 rope": transformers.LlamaConfig(
        **SMALL,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma": transformers.GemmaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=1, head_dim=8),
    "mixtral": transformers.MixtralConfig(**SMALL, num_attention_heads=4, num_local_experts=2),
    "bfloat16": transformers.LlamaConfig(**SMALL, num_attention_heads=4, dtype="bfloat16"),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, num_attention_heads=4),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_sizes(name: str) -> None:
    built = build(name, training=True)
    assert built.parameters == SIZES[name]
    assert all(parameter.is_meta for parameter in built.model.parameters())
    assert built.weights is None
    assert built.tokenizer is None
    assert not built.model.config.use_cache
    assert not any(m.p for m in built.model.modules() if isinstance(m, torch.nn.Dropout))
    assert built.model.lm_head.weight is built.model.transformer.wte.weight


@pytest.mark.parametrize("name", CONFIGS)
def test_a_directory_is_built_as_from_pretrained_does(name: str, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    built = build(tmp_path, training=False)
    assert built.weights == tmp_path
    assert not built.model.training
    assert all(parameter.is_meta for parameter in built.model.parameters())
    assert [n for n, _ in built.model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    expected, found = dict(plain.named_buffers()), dict(built.model.named_buffers())
    assert found.keys() == expected.keys()
    for buffer, value in expected.items():
        assert found[buffer].dtype is value.dtype
        assert torch.equal(found[buffer], value)


def test_buffers_that_are_saved_are_loaded(tmp_path: Path) -> None:
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.register_buffer("extra", torch.arange(3.0))
    model.save_pretrained(tmp_path)
    from outcore.integrations.transformers import _load_buffers

    other = transformers.AutoModelForCausalLM.from_config(config)
    other.register_buffer("extra", torch.zeros(3))
    _load_buffers(other, tmp_path)
    assert torch.equal(other.extra, torch.arange(3.0))


def test_modules_outside_register_as_always() -> None:
    register = torch.nn.Module.register_parameter
    with meta_parameters():
        assert torch.nn.Linear(2, 2).weight.is_meta
    with pytest.raises(TypeError), meta_parameters():
        torch.nn.Linear("two", 2)
    assert torch.nn.Module.register_parameter is register
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_unknown_models_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'gpt9'.*gpt2-1\.3b"):
        build("gpt9", training=True)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        build(tmp_path, training=True)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text().rstrip().removesuffix("}")
    config.write_text(text + ', "quantization_config": {"quant_method": "gptq", "bits": 4}}')
    with pytest.raises(ModelError, match="quantised"):
        build(tmp_path, training=True)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer in"):
        build(tmp_path, training=True)


def test_a_model_that_does_not_write_text_is_refused(tmp_path: Path) -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="no causal language model"):
        build(tmp_path, training=True)
