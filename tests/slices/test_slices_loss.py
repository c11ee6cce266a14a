"""The head and the cross-entropy in slices: the loss of transformers, without its logits."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import outcore
from exact.families import bert, gpt2, llama, t5, vit
from outcore.errors import ModelError, StateError
from outcore.model.slices.heads import KNOWN, asks_for_slices, slice_loss, slices_loss
from outcore.model.slices.loss import summed_cross_entropy
from outcore.offloaded import engine_of

VOCABULARY, ROWS, LENGTH = 211, 4, 24


def made(build: Any) -> Any:
    torch.manual_seed(3)
    return build().eval()  # without dropout


def mistral() -> nn.Module:
    return hf.MistralForCausalLM(
        hf.MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(
        hf.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


MODELS = pytest.mark.parametrize("build", [gpt2, llama, mistral, qwen2], ids=lambda build: build.__name__)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


# -- the function --------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [1, 7, 50, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_sum_and_its_gradients(positions: int, with_bias: bool, keeps: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(33, 16, requires_grad=True)
    bias = torch.randn(33, requires_grad=True) if with_bias else None
    labels = torch.randint(0, 33, (50,))
    labels[::9] = -100
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    expected = F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="sum")
    expected_gradients = torch.autograd.grad(expected * 0.3, inputs)
    found = summed_cross_entropy(hidden, weight, bias, labels, -100, positions, keeps)
    found_gradients = torch.autograd.grad(found * 0.3, inputs)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_serve_every_backward_and_save_a_product(dtype: torch.dtype) -> None:
    """In fp32, too, where what backward makes of them must not be made in their place."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16).to(dtype).requires_grad_() for n in (40, 70))
    labels = torch.randint(0, 70, (40,))
    with _Products() as counted:
        loss = summed_cross_entropy(hidden, weight, None, labels, -100, 10, True)
    assert counted.flops == 2 * 40 * 70 * 16
    with _Products() as counted:
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert counted.flops == 2 * 2 * 40 * 70 * 16
    second = torch.autograd.grad(loss, (hidden, weight))
    again = summed_cross_entropy(hidden, weight, None, labels, -100, 10)
    for a, b, c in zip(first, second, torch.autograd.grad(again, (hidden, weight)), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


class _Products(FlopCounterMode):
    """Counts operations of matrix products."""

    def __init__(self) -> None:
        super().__init__(display=False)

    @property
    def flops(self) -> int:
        return self.get_total_flops()


def test_against_double_precision() -> None:
    """bf16 inputs, large logits: the loss is right to 1e-6 of what the logits in bf16 give."""
    torch.manual_seed(0)
    hidden, weight = (4 * torch.randn(64, 32)).bfloat16(), torch.randn(500, 32).bfloat16()
    labels = torch.randint(0, 500, (64,))
    logits = F.linear(hidden, weight).double()
    expected = F.cross_entropy(logits, labels, reduction="sum").item()
    assert summed_cross_entropy(hidden, weight, None, labels, -100, 10).item() == pytest.approx(
        expected, rel=1e-6
    )


def test_what_needs_no_gradient_gets_none() -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    summed_cross_entropy(hidden, weight, None, torch.zeros(6, dtype=torch.long), -100, 2).backward()
    assert hidden.grad is not None
    assert weight.grad is None


# -- models --------------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize(
    ("positions", "logits"), [(5, "recompute"), (24, "keep"), (24, "recompute"), (10_000, "keep")]
)
def test_models_give_the_loss_and_gradients_of_transformers(build: Any, positions: int, logits: Any) -> None:
    model = made(build)
    assert slices_loss(model)
    loss = model(**batch()).loss
    loss.backward()
    expected = gradients(model)
    undo = slice_loss(model, outcore.Activations(loss_slice=positions, logits=logits))
    output = model(**batch())
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert output.logits is None
    assert "logits" not in output
    output.loss.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    undo()
    assert torch.equal(model(**batch()).loss, loss)
    assert model(**batch()).logits is not None
    assert not {"forward", "_loss_function"} & {*vars(model.lm_head), *vars(model)}


def test_the_loss_takes_what_transformers_takes() -> None:
    """A number of items to divide by, labels that are shifted already, tuples; and plain logits without labels."""
    model, given = made(gpt2), batch()
    shifted = F.pad(given["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    calls: list[dict[str, Any]] = [
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(40)},
        {"shift_labels": shifted},
        {"ignore_index": 5},
    ]
    calls[3]["labels"] = given["labels"].clamp(min=5)
    expected = [model(**{**given, **call}).loss.item() for call in calls]
    slice_loss(model, outcore.Activations(loss_slice=9))
    for call, loss in zip(calls, expected, strict=True):
        assert model(**{**given, **call}).loss.item() == pytest.approx(loss, rel=1e-6), call
    loss, logits = model(**given, return_dict=False)[:2]
    assert logits is None
    assert loss.requires_grad
    assert model(input_ids=given["input_ids"]).logits.shape == (ROWS, LENGTH, VOCABULARY)
    with torch.no_grad():
        assert model(**given).logits.shape == (ROWS, LENGTH, VOCABULARY)


def test_a_forward_that_raised_leaves_nothing_behind() -> None:
    model, given = made(gpt2), batch()
    slice_loss(model, outcore.Activations(loss_slice=9))
    with pytest.raises(IndexError):
        model(input_ids=given["input_ids"] + 1000, labels=given["labels"])
    assert model(input_ids=given["input_ids"]).logits is not None


@pytest.mark.parametrize("build", [bert, t5])
def test_models_that_are_not_known_are_left_alone_with_a_word(build: Any) -> None:
    model = made(build)
    name = type(model).__name__
    with pytest.warns(
        UserWarning, match=f"the loss of a {name} can't run in slices: outcore knows {KNOWN[0]}"
    ):
        assert not asks_for_slices(model, outcore.Activations("recompute", microbatch=1))
    with pytest.raises(ModelError, match="leave loss_slice out"):
        asks_for_slices(model, outcore.Activations(loss_slice=8))
    assert "forward" not in vars(model)


@pytest.mark.parametrize("build", [vit, lambda: nn.Linear(2, 2)], ids=["vit", "linear"])
def test_nobody_expects_a_vocabulary_elsewhere(build: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not asks_for_slices(made(build), outcore.Activations("recompute", microbatch=1))


def test_a_model_with_another_loss_is_not_known() -> None:
    model = made(gpt2)
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    assert not slices_loss(model)


def test_a_head_with_a_forward_of_its_own_is_not_known_and_keeps_it() -> None:
    model = made(gpt2)
    whole = model.lm_head.forward

    def capped(hidden: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(whole(hidden) / 3)

    model.lm_head.forward = capped
    expected = model(**batch()).loss.item()
    recompute = outcore.Activations("recompute", microbatch=1)
    with pytest.warns(UserWarning, match="can't run in slices") as said:
        outcore.offload(model, precision="fp32", device="cpu", activations=recompute)
    assert [warning.filename for warning in said] == [__file__]
    assert model(**batch()).loss.item() == pytest.approx(expected, rel=1e-6)
    outcore.release(model)
    assert model.lm_head.forward is capped


# -- memory --------------------------------------------------------------------------------------------


def peak(build: Any, rows: int, length: int, vocabulary: int, **settings: Any) -> int:
    """Bytes of activations and temporaries of a step, as the gauge measured them."""
    torch.manual_seed(3)
    model = build()
    optimizer = outcore.SGD(model.parameters(), lr=1e-3)
    outcore.offload(
        model,
        optimizer,
        budget=outcore.Budget(host="1GiB"),
        device="cpu",
        activations=outcore.Activations("recompute", **settings),
    )
    ids = torch.randint(0, vocabulary, (rows, length))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    found = engine_of(model).gauge.largest
    outcore.release(model)
    return found


def wide(vocabulary: int = 6000) -> Any:
    config = hf.GPT2Config(
        vocab_size=vocabulary,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return hf.GPT2LMHeadModel(config)


def test_full_logits_never_exist() -> None:
    """The logits of 512 positions take 6 MB in bf16 and 12 MB in fp32; the peak with slices is below one copy."""
    logits = 8 * 64 * 6000
    whole = peak(wide, 8, 64, 6000)
    assert whole > (2 + 4 + 4) * logits  # bf16, widened, and their gradient
    sliced = peak(wide, 8, 64, 6000, loss_slice=32)
    part = logits * 32 // (8 * 64)
    assert sliced < 2 * logits
    weight = 6000 * 32 * 2
    assert sliced < 4 * weight + 16 * part + (2 << 20)
    kept = peak(wide, 8, 64, 6000, loss_slice=32, logits="keep")
    assert sliced + logits < kept <= sliced + 2 * logits


def test_microbatch_slices_the_loss_too(tmp_path: Path) -> None:
    """By default a slice of the loss has as many positions as a micro-batch."""
    assert peak(wide, 8, 64, 6000, microbatch=1) < peak(wide, 8, 64, 6000) / 4


def test_an_offloaded_model_is_refused_as_ever_when_copied() -> None:
    model = made(gpt2)
    outcore.offload(
        model,
        budget=outcore.Budget(host="1GiB"),
        device="cpu",
        activations=outcore.Activations("recompute", microbatch=1),
    )
    with pytest.raises(StateError, match="can't be copied or pickled"):
        copy.deepcopy(model)
    outcore.release(model)
    assert slices_loss(model)  # nothing of ours is left
