"""Models to plan for: their shapes alone, without weights.

Beside what `outcore.integrations.transformers.build` knows, large models by name, and directories or files with
nothing but a configuration.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outcore.errors import UsageError
from outcore.integrations.presets import PRESETS
from outcore.integrations.transformers import Built, config_of, empty, preset, require


def _gpt3() -> Any:
    """GPT-3 175B (Brown et al. 2020, table 2.1), with GPT-2's dense attention; the paper alternates sparse layers."""
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=96,
        n_embd=12288,
        n_head=96,
        n_positions=2048,
        vocab_size=50257,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )


def _llama(layers: int, width: int, heads: int, shared: int, inner: int, positions: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=inner,
        max_position_embeddings=positions,
        vocab_size=32000,
    )


SHAPES = {
    # Touvron et al. 2023, "LLaMA", table 2 and "Llama 2", table 1 (70B: grouped queries, 8 keys and values)
    "llama-7b": lambda: _llama(32, 4096, 32, 32, 11008, 4096),
    "llama-13b": lambda: _llama(40, 5120, 40, 40, 13824, 4096),
    "llama-70b": lambda: _llama(80, 8192, 64, 8, 28672, 4096),
    "gpt3-175b": _gpt3,
}
"""Large models by name, to plan for."""


def shape(name: str | os.PathLike[str]) -> Built:
    """A causal language model on ``meta`` by the name of a preset or shape, or the path of its configuration.

    Args:
        name: a preset, one of `SHAPES`, a directory with ``config.json``, or such a file.

    Raises:
        UsageError: there is none of that name, or transformers is not installed.
        ModelError: the configuration can't be used.
    """
    require()
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text in SHAPES and not path.exists():
        config = SHAPES[text]()
    elif text in PRESETS and not path.exists():
        config = preset(text)
    elif path.is_dir() or (path.suffix == ".json" and path.is_file()):
        config = config_of(path)
    else:
        known = ", ".join((*PRESETS, *SHAPES))
        raise UsageError(
            f"unknown model {text!r}: name a directory with config.json, such a file, or one of {known}"
        )
    model = empty(config)
    model.config.use_cache = False
    model.train()
    return Built(text, model, model.config, None, None)
