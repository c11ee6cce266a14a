"""Sizes of the GPT-2 family, by name.

All presets have dropout 0.0: at the few passes over the data that a run out of core makes, dropout costs
memory and time and gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One size of `GPT-2 <https://openai.com/index/better-language-models/>`_ (Radford et al. 2019).

    Attributes:
        layers: transformer blocks.
        width: size of the hidden state.
        heads: attention heads.
        positions: the longest sequence.
        vocabulary: entries of the embedding.
        lr_scale: of the learning rate, 1 for the smallest size (Brown et al. 2020, table 2.1).
    """

    layers: int
    width: int
    heads: int
    positions: int = 1024
    vocabulary: int = 50257
    lr_scale: float = 1.0

    def config(self) -> dict[str, Any]:
        """The arguments of ``transformers.GPT2Config``."""
        return {
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": self.heads,
            "n_positions": self.positions,
            "vocab_size": self.vocabulary,
            "bos_token_id": self.vocabulary - 1,
            "eos_token_id": self.vocabulary - 1,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }


PRESETS = {
    "gpt2": Preset(12, 768, 12),
    "gpt2-medium": Preset(24, 1024, 16, lr_scale=1 / 2),
    "gpt2-large": Preset(36, 1280, 20, lr_scale=5 / 12),
    "gpt2-xl": Preset(48, 1600, 25, lr_scale=1 / 3),
    "gpt2-1.3b": Preset(24, 2048, 16, lr_scale=1 / 3),
    "gpt2-tiny": Preset(2, 64, 4, positions=128, vocabulary=2048),
}
"""The sizes that were published, the 1.3 billion parameters often trained on one GPU, and one for tests."""
