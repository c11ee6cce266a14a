"""Toy models of transformers' families, each with batches from a seed."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from exact.shapes import Batch, Shape

VOCABULARY, LENGTH = 211, 24


def _ids(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def _causal(seed: int) -> Batch:
    ids = _ids(seed)
    return {"input_ids": ids, "labels": ids}


def _masked(seed: int) -> Batch:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -5:] = 0
    return {"input_ids": _ids(seed), "labels": _ids(seed + 1), "attention_mask": mask}


def _pairs(seed: int) -> Batch:
    return {"input_ids": _ids(seed), "labels": _ids(seed + 1, 9)}


def _images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def _loss(output: Any) -> torch.Tensor:
    return output.loss


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=128, n_layer=3, n_head=4, use_cache=False
    )
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return hf.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    return hf.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",  # the grouped kernel needs integer histograms, which the CPU lacks
        use_cache=False,
    )
    return hf.MixtralForCausalLM(config)


FAMILIES = [
    Shape("gpt2", gpt2, _causal, _loss),
    Shape("llama", llama, _causal, _loss),
    Shape("bert", bert, _masked, _loss),
    Shape("t5", t5, _pairs, _loss),
    Shape("vit", vit, _images, _loss),
    Shape("mixtral", mixtral, _causal, _loss),
]
