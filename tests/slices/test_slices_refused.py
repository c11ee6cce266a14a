"""Blocks that can't run in slices are refused, with a reason, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import outcore
from exact.families import gpt2
from exact.shapes import SHAPES, built
from outcore.errors import ModelError, StateError, UsageError
from slices.comparing import WIDTH, Around, rows, sliced


class Mean(nn.Module):
    """Takes the mean of the batch, with a weight that is zero for now."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight * x.mean(0, keepdim=True)


MIXING: dict[str, Callable[[], nn.Module]] = {
    "mean": Mean,
    "layers with the sequence first": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0),
    "one choice for all": lambda: Around(lambda x: x if x.mean() > 0 else 2 * x),
    "a mean beside": lambda: Around(lambda x: (x, x.mean())),
    "scaled by the largest": lambda: Around(lambda x: x / x.abs().max()),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_block_that_mixes_samples_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    module = MIXING[name]()
    sliced(module)
    with pytest.raises(ModelError, match=r"the block the\.block mixes the samples of a batch"):
        module(rows(4, 4, WIDTH) if name.startswith("layers") else rows())


def test_batch_norm_is_refused_by_name_while_it_trains() -> None:
    module = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3))
    before = {n: b.clone() for n, b in module.named_buffers()}
    sliced(module)
    with pytest.raises(ModelError, match=r"the\.block has a BatchNorm1d in training mode"):
        module(rows())
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())
    module.eval()
    module(rows()).sum().backward()


def test_what_a_probe_writes_into_buffers_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x

    module = Counting()
    sliced(module)
    module(rows().requires_grad_())
    assert module.calls == 3  # once for each slice


def test_a_block_that_changes_its_input_is_refused() -> None:
    module = nn.ReLU(inplace=True)
    sliced(module)
    x = rows()
    kept = x.clone()
    with pytest.raises(ModelError, match=r"the\.block changes its input in place"):
        module(x)
    assert torch.equal(x, kept)


def test_a_block_without_a_batch_is_refused() -> None:
    module = Around(torch.tanh)
    module.linear = nn.Identity()  # type: ignore[assignment]
    sliced(module)
    with pytest.raises(ModelError, match=r"the\.block is given no tensor with a batch dimension"):
        module(torch.ones(()))


def test_a_tensor_that_comes_by_another_way_is_refused() -> None:
    """Its gradient would get lost."""
    module, other = Around(torch.tanh), rows(1).requires_grad_()
    sliced(module)
    for hidden in (other, other * 2):
        module.function = lambda x, hidden=hidden: x * hidden
        with pytest.raises(
            ModelError, match=r"the\.block uses a tensor that needs gradients and is none of its arg"
        ):
            module(rows())
        module.function = lambda x, hidden=hidden: x * hidden.detach()
        module(rows()).sum().backward()


def test_the_first_call_may_be_in_inference_mode() -> None:
    module, x = Around(torch.tanh), rows()
    expected = module(x).detach()
    sliced(module)
    with torch.inference_mode():
        torch.testing.assert_close(module(rows()), expected)
    module(x).sum().backward()


def test_containers_that_are_not_rebuilt_are_refused() -> None:
    output = hf.modeling_outputs.BaseModelOutput
    module = Around(lambda x, other=None: output(last_hidden_state=x))
    sliced(module)
    with pytest.raises(ModelError, match=r"the\.block returns a BaseModelOutput"):
        module(rows())
    with pytest.raises(ModelError, match=r"given tensors within a BaseModelOutput"):
        module(rows(), output(last_hidden_state=rows()))


def test_a_cache_is_refused_in_training_and_used_in_generation() -> None:
    torch.manual_seed(0)
    model: Any = gpt2()
    model.config.use_cache = True
    ids = torch.randint(0, 200, (4, 6))
    model.eval()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    outcore.offload(
        model,
        precision=outcore.Precision("fp32"),
        budget=outcore.Budget(host="1GiB"),
        device="cpu",
        activations=outcore.Activations("recompute", microbatch=2),
    )
    found = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found, expected)
    with pytest.raises(ModelError, match=r"transformer\.h\.0 is given a cache .*config\.use_cache = False"):
        model(input_ids=ids, labels=ids)
    model.config.use_cache = False
    model(input_ids=ids, labels=ids)
    outcore.release(model)


def test_blocks_that_checkpoint_themselves_are_refused() -> None:
    model: Any = gpt2()
    model.transformer.h[0].gradient_checkpointing = True
    with pytest.raises(ModelError, match=r"transformer\.h\.0 checkpoints itself.*checkpointing_disable"):
        outcore.offload(
            model,
            outcore.SGD(model.parameters(), lr=0.1),
            budget=outcore.Budget(host="1GiB"),
            device="cpu",
            activations=outcore.Activations("recompute", microbatch=2),
        )


@pytest.mark.parametrize("name", ["dicts", "experts", "convolutions"])
def test_shapes_that_mix_are_refused_when_offloaded(name: str) -> None:
    shape = next(shape for shape in SHAPES if shape.name == name)
    model = built(shape)
    outcore.offload(
        model,
        outcore.SGD(model.parameters(), lr=0.1),
        budget=outcore.Budget(host="1GiB"),
        device="cpu",
        activations=outcore.Activations("recompute", microbatch=1),
    )
    first = "stages.0" if name == "convolutions" else "blocks."
    with pytest.raises(ModelError, match=f"the block {first}"):
        model(**shape.batch(0))
    outcore.release(model)


def test_a_backward_that_raises_within_a_slice_leaves_nothing_behind() -> None:
    """The third gradient of a parameter, in the second block's third slice, raises: the next step is as ever."""
    losses = []
    for fails in (False, True):
        model = built(SHAPES[0])
        optimizer = outcore.AdamW(model.parameters(), lr=1e-2)
        count = 0

        def fail(gradient: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise KeyError("planted")

        outcore.offload(
            model,
            optimizer,
            budget=outcore.Budget(host="1GiB"),
            device="cpu",
            activations=outcore.Activations("recompute", microbatch=1),
        )
        batch = SHAPES[0].batch(0)
        if fails:
            handle = model.blocks[1].up.weight.register_hook(fail)
            with pytest.raises(KeyError, match="planted"):
                model(**batch).float().square().mean().backward()
            assert count == 3
            handle.remove()
            optimizer.zero_grad()
        for _ in range(3):
            loss = model(**batch).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        outcore.release(model)
    assert losses[:3] == losses[3:]


def test_double_backward_is_refused() -> None:
    model = built(SHAPES[0])
    outcore.offload(
        model,
        outcore.SGD(model.parameters(), lr=0.1),
        budget=outcore.Budget(host="1GiB"),
        device="cpu",
        activations=outcore.Activations("recompute", microbatch=1),
    )
    with pytest.raises(StateError, match="create_graph"):
        model(**SHAPES[0].batch(0)).float().sum().backward(create_graph=True)
    outcore.release(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"microbatch": 2},
        {"blocks": "recompute", "microbatch": 0},
        {"loss_slice": -1},
        {"loss_slice": True},
        {"logits": "keep"},
        {"loss_slice": 8, "logits": "offload"},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"microbatch|loss_slice|logits"):
        outcore.Activations(**settings)
