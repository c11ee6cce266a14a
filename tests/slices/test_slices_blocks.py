"""One block in slices, without any offloading: what is cut and what is summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import nn

import outcore
from exact.families import bert, gpt2, llama, t5, vit
from outcore.errors import ModelError
from outcore.model.activations import treat_blocks, ways_of
from outcore.model.slices.block import recompute_in_slices
from outcore.model.trees import take_apart
from outcore.model.units import discover
from outcore.offloaded import engine_of
from slices.comparing import WIDTH, Around, compare, rows, sliced


def test_a_batch() -> None:
    compare(Around(torch.tanh), (rows(),))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_size_of_slice(size: int) -> None:
    compare(Around(torch.tanh), (rows(),), size)


def test_what_carries_the_batch_is_cut_and_all_else_passes_whole() -> None:
    def function(x: Any, cut: Any, whole: Any, pair: Any, nested: Any, nothing: Any, number: Any) -> Any:
        assert nothing is None
        assert number == 3
        assert len(cut) == len(x) == len(nested["mask"])
        assert whole.shape[0] == 1
        cos, sin = pair
        return (x * cos + cut * sin + whole * nested["list"][0]) * nested["mask"] + number

    cut, mask = rows(seed=1), rows(5, 1, 1, seed=2)
    whole, cos, sin, place = rows(1, seed=3), rows(1, seed=4), rows(1, seed=5), rows(3, WIDTH, seed=6)

    def own(start: int, stop: int) -> tuple[Any, ...]:
        nested = {"mask": mask[start:stop], "list": [place]}
        return rows()[start:stop], cut[start:stop], whole, (cos, sin), nested, None, 3

    compare(Around(function), (rows(), *own(0, 5)[1:]), own=own)


def test_keyword_arguments() -> None:
    mask = rows(5, 1, 1, seed=2)
    module = Around(lambda x, mask, scale: x * mask * scale)
    whole = module(rows(), mask=mask, scale=2.0)
    sliced(module)
    torch.testing.assert_close(module(rows(), mask=mask, scale=2.0), whole)
    torch.testing.assert_close(module(x=rows(), mask=mask, scale=2.0), whole)


class Pair(NamedTuple):
    hidden: Any
    other: Any


@pytest.mark.parametrize(
    "outputs",
    [
        lambda x: (x, x.sum(-1)),
        lambda x: [x, {"sum": x.sum(-1), "none": None}],
        lambda x: Pair(x, (x.exp(), 4)),
        lambda x: {"x": x, "index": x.argmax(-1)},
    ],
    ids=["tuple", "list", "named", "dict"],
)
def test_outputs_come_together(outputs: Callable[[torch.Tensor], Any]) -> None:
    module, x = Around(outputs), rows()
    skeleton, expected = take_apart(module(x))
    sliced(module)
    again, found = take_apart(module(x))
    assert repr(again) == repr(skeleton)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == b.requires_grad


def test_outputs_without_rows_count_once() -> None:
    """A bias made of parameters alone is the same for all slices, and so is its gradient."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(rows(1))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            return x * self.scale + self.bias, 2 * self.bias

    module, x = Biased(), rows()

    def gradient() -> torch.Tensor:
        out, bias = module(x)
        (out.sum() + (bias * rows(1, seed=8)).sum()).backward()
        found, module.bias.grad = module.bias.grad, None
        assert found is not None
        return found

    expected = gradient()
    recompute_in_slices(module, "block", 2)
    torch.testing.assert_close(gradient(), expected)


def test_whole_arguments_that_need_gradients() -> None:
    module, x = Around(lambda x, bias: x + bias), rows()
    bias = rows(1, seed=3).requires_grad_()
    module(x, bias).square().sum().backward()
    expected, bias.grad = bias.grad, None
    sliced(module)
    module(x, bias).square().sum().backward()
    torch.testing.assert_close(bias.grad, expected)


def test_one_tensor_in_two_places() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    x = rows().requires_grad_()
    attention(x, x, x)[0].square().sum().backward()
    expected, x.grad = x.grad, None
    sliced(attention)
    attention(x, x, x)[0].square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("name", ["mask", "src_mask", "cache_position", "position_ids"])
def test_where_batch_and_sequence_are_as_long(name: str) -> None:
    """Named ones are known; any other is refused rather than guessed."""
    shapes: dict[str, tuple[int, ...]] = {}

    class Named(nn.Module):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            shapes[name] = tuple(kwargs[name].shape)
            return x

    module, x = Named(), rows(4, 4, WIDTH).requires_grad_()
    sliced(module)
    if name == "mask":
        with pytest.raises(
            ModelError, match=r"the.block is given mask of shape \[4, 4\].*use another batch size"
        ):
            module(x, **{name: torch.ones(4, 4)})
        return
    module(x, **{name: torch.ones(4, 4)})
    assert shapes[name] == ((2, 4) if name == "position_ids" else (4, 4))


# -- random numbers, modes, memory ---------------------------------------------------------------------


def test_dropout_is_drawn_again() -> None:
    compare(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)), (rows(),))


def test_backward_draws_nothing_that_others_would_draw() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    sliced(module)
    torch.manual_seed(0)
    loss = module(rows()).sum()
    state = torch.get_rng_state()
    torch.rand(3)
    later = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), later)
    torch.manual_seed(0)
    module(rows())
    assert torch.equal(torch.get_rng_state(), state)  # the probe of the first call drew nothing either


@pytest.mark.parametrize("training", [True, False])
def test_encoder_layers(training: bool) -> None:
    """In eval mode torch has a fast path for layers that need no gradient: no slice may take it."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True).train(training)
    mask = torch.zeros(5, 3, dtype=torch.bool)
    mask[:, 2] = True
    compare(
        layer,
        (rows(), None, mask),
        own=lambda start, stop: (rows()[start:stop], None, mask[start:stop]),
    )


def test_without_gradients_slices_are_the_same() -> None:
    module = Around(torch.tanh)
    sliced(module)
    expected = module(rows())
    with torch.no_grad():
        found = module(rows())
    assert torch.equal(found, expected)
    assert not found.requires_grad
    with torch.inference_mode():
        assert torch.equal(module(rows()), expected)


def test_autocast_is_as_it_was() -> None:
    module, x = Around(torch.tanh), rows().requires_grad_()
    seen = []
    module.function = lambda y: seen.append(y.dtype) or y.float()
    sums = sliced(module)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)
        again = module(x)
    (output + again).sum().backward()
    assert set(seen) == {torch.bfloat16}
    assert all(bool(sums[p].any()) for p in module.parameters())


def test_two_backwards_through_one_graph() -> None:
    module, x = Around(torch.tanh), rows().requires_grad_()
    sums = sliced(module)
    loss = module(x).sum()
    loss.backward(retain_graph=True)
    first = {p: s.clone() for p, s in sums.items()}
    loss.backward()
    assert all(torch.equal(sums[p], first[p]) for p in sums)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_activations_of_one_slice_exist() -> None:
    """By the bytes that the gauge measures: a block that leaves 40 times its input behind."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            for _ in range(40):
                y = torch.sin(y) * y
            return y

    def peak(**settings: Any) -> int:
        model = nn.Sequential(*(Deep() for _ in range(2)))
        optimizer = outcore.SGD(model.parameters(), lr=1e-3)
        outcore.offload(
            model,
            optimizer,
            budget=outcore.Budget(host="1GiB"),
            device="cpu",
            precision=outcore.Precision("fp32"),
            activations=outcore.Activations("recompute", **settings),
        )
        model(rows(64, 128, WIDTH)).sum().backward()
        optimizer.step()
        found = engine_of(model).gauge.largest
        outcore.release(model)
        return found

    batch = 64 * 128 * WIDTH * 4
    whole, eighth = peak(), peak(microbatch=8)
    assert whole > 80 * batch
    assert eighth < 80 * batch // 8 + 6 * batch


def test_undoing_leaves_no_trace() -> None:
    module = Around(torch.tanh)
    undo = recompute_in_slices(module, "block", 2)
    assert "forward" in vars(module)
    undo()
    assert "forward" not in vars(module)


def test_without_offloading_gradients_go_where_they_always_go() -> None:
    module, x = Around(torch.tanh), rows()
    module(x).sum().backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    recompute_in_slices(module, "block", 2)
    module(x).sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _given(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, hf.ViTForImageClassification):
        return {"pixel_values": torch.randn(5, 3, 32, 32, generator=generator), "labels": torch.arange(5)}
    ids = torch.randint(0, 200, (5, 12), generator=generator)
    mask = torch.ones(5, 12, dtype=torch.long)
    mask[1:3, -4:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


@pytest.mark.parametrize("build", [gpt2, llama, bert, t5, vit], ids=lambda build: build.__name__)
@pytest.mark.filterwarnings("ignore:the loss of:UserWarning")
def test_transformers_agree_with_the_batch_as_one(build: Any) -> None:
    """Masks that carry the batch, position biases, rotary pairs: close in fp32 to what the model gives by itself."""
    torch.manual_seed(0)
    model: Any = build().eval()
    given = _given(model)
    loss = model(**given).loss
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    sums: dict[nn.Parameter, torch.Tensor] = {}
    model.zero_grad()

    def collect(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        sums[parameter] = gradient

    points = discover(model)[1]
    blocks = list(treat_blocks(points, ways_of(points, outcore.Activations("recompute")), 2, collect))
    assert blocks
    found = model(**given).loss
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    found.backward()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, parameter in model.named_parameters():
        if name in expected:
            total = sum(g for g in (sums.get(parameter), parameter.grad) if g is not None)
            assert isinstance(total, torch.Tensor), name
            torch.testing.assert_close(
                total, expected[name], rtol=1e-4, atol=1e-6 * max(1, largest), msg=name
            )
