"""The models that contenders train and generate with: one definition, one set of weights, one batch for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TILE = 1 << 20


@dataclass(frozen=True)
class Model:
    """A shape by its transformers configuration."""

    kind: str
    config: dict[str, Any]

    def build(self) -> Any:
        """The model on the CPU in fp32, in training mode, with the same weights each time."""
        import transformers
        from transformers.initialization import no_init_weights

        config = getattr(transformers, f"{self.kind}Config")(**self.config)
        with no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
            model.tie_weights()
        model.config.use_cache = False
        fill(model)
        return model.train()


def _gpt2(layers: int, width: int, heads: int, vocabulary: int = 50257, positions: int = 1024) -> Model:
    dropped = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": positions}
    ends = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    return Model("GPT2", {**sizes, **dropped, **ends, "vocab_size": vocabulary})


def _llama(layers: int, width: int, inner: int, heads: int, vocabulary: int = 32000) -> Model:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner}
    return Model(
        "Llama",
        {**sizes, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocabulary},
    )


MODELS = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-7m": _gpt2(4, 256, 4, vocabulary=16384),
    "gpt2-17m": _gpt2(6, 384, 6, vocabulary=16384),
    "gpt2-34m": _gpt2(8, 512, 8, vocabulary=16384),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-1.3b": _gpt2(24, 2048, 16),
    "gpt2-1.3b, 2 blocks": _gpt2(2, 2048, 16),
    "gpt2-1.3b, 5 blocks": _gpt2(5, 2048, 16),
    "llama-7b": _llama(32, 4096, 11008, 32),
    "gpt2-tiny": _gpt2(4, 128, 4, vocabulary=512, positions=64),
    "llama-tiny": _llama(4, 128, 256, 4, vocabulary=512),
}


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Normal weights of 0.02, ones in norms, zeros in biases; the same ones for everybody, and fast to make."""
    generator = torch.Generator().manual_seed(0)
    tile = torch.empty(TILE).normal_(0.0, 0.02, generator=generator)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), TILE):
                flat[start : start + TILE].copy_(tile[: flat.numel() - start])
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def batch(model: str, rows: int, tokens: int, number: int) -> torch.Tensor:
    """Token numbers of shape [rows, tokens], by the number of the step."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(0, MODELS[model].config["vocab_size"], (rows, tokens), generator=generator)
