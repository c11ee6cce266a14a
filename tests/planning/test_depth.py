"""Deep models are traced by a few of their blocks, and come out as if all had been traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import outcore
from outcore.planning.depth import Depth
from outcore.planning.fake_step import Trace
from outcore.planning.subject import Subject

IDS = torch.zeros(4, 12, dtype=torch.long)
BATCH = {"input_ids": IDS, "labels": IDS}
WAYS = [outcore.Activations("keep"), outcore.Activations("recompute"), outcore.Activations("recompute", 2)]
ODD: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def gpt2(layers: int = 9) -> Any:
    config = hf.GPT2Config(
        n_layer=layers, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False, **ODD
    )
    return hf.GPT2LMHeadModel(config)


def llama() -> Any:
    config = hf.LlamaConfig(
        num_hidden_layers=9,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
        **ODD,
    )
    return hf.LlamaForCausalLM(config)


def t5() -> Any:
    config = hf.T5Config(
        num_layers=8,
        num_decoder_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        vocab_size=64,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


class Odd(nn.Module):
    """Nine blocks that are called as asked."""

    def __init__(self, order: Any = None, wide: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 16 if k == wide else 8), nn.GELU(), nn.Linear(16 if k == wide else 8, 8)
            )
            for k in range(9)
        )
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = range(len(self.blocks)) if self.order is None else self.order
        for k in order:
            x = self.blocks[k](x)
        return x


def subject(model: nn.Module, batch: Any = None) -> Subject:
    return Subject(model.train(), outcore.AdamW(model.parameters()), BATCH if batch is None else batch)


def same(found: Trace, whole: Trace) -> None:
    assert len(found.spans) == len(whole.spans)
    for a, b in zip(found.spans, whole.spans, strict=True):
        assert a == b
    assert (found.tokens, found.wide) == (whole.tokens, whole.wide)
    assert abs(found.growth - whole.growth) <= whole.growth - whole.peak + found.growth - found.peak


@pytest.mark.parametrize("activations", WAYS, ids=str)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_what_is_put_in_is_what_would_have_been_traced(make: Any, activations: outcore.Activations) -> None:
    given = subject(make())
    found = given._by_depth(4, activations)
    assert found is not None
    same(found, given._whole(4, activations))


def test_blocks_that_share_more_than_their_shape_come_out_the_same() -> None:
    given = subject(t5())  # their encoder's positions are the first block's
    same(given.trace(4, WAYS[0]), given._whole(4, WAYS[0]))


def test_tapes_of_blocks_that_were_put_in_are_those_of_their_kind() -> None:
    given = subject(gpt2())
    given.taped = True
    found = given._by_depth(4, WAYS[1])
    assert found is not None
    signatures = [
        [getattr(span.tape, "signature", "") for span in trace.spans]
        for trace in (found, given._whole(4, WAYS[1]))
    ]
    assert signatures[0] == signatures[1]


def test_the_model_is_whole_again() -> None:
    model = gpt2()
    names = [name for name, _ in model.named_parameters()]
    subject(model).trace(4, WAYS[0])
    assert [name for name, _ in model.named_parameters()] == names
    assert len(model.transformer.h) == 9


X = {"x": torch.zeros(3, 8)}


@pytest.mark.parametrize(
    "model",
    [Odd(wide=4), gpt2(7)],
    ids=["unlike", "few"],
)
def test_what_is_not_alike_or_not_many_is_traced_whole(model: nn.Module) -> None:
    names = frozenset(name for name, _ in model.named_parameters())
    assert Depth.of(model, names) is None


def test_blocks_of_which_not_all_are_trained_alike_are_not_alike() -> None:
    model = gpt2()
    model.transformer.h[4].mlp.c_fc.bias.requires_grad = False
    assert Depth.of(model, frozenset(name for name, _ in model.named_parameters())) is None
    model = gpt2()
    trained = frozenset(name for name, _ in model.named_parameters() if "h.4." not in name)
    assert Depth.of(model, trained) is None


@pytest.mark.parametrize(
    "order", [range(9), [0, 2, 1, 3, 4], [0, 1, 2, 3, 4, 2, 3]], ids=["counted", "mixed", "again"]
)
def test_a_model_that_calls_its_blocks_in_its_own_order_is_traced_whole(order: Any) -> None:
    given = subject(Odd(order), X)
    assert given._by_depth(3, WAYS[0]) is None
    same(given.trace(3, WAYS[0]), given._whole(3, WAYS[0]))
