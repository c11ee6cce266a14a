"""Language models whose head and loss outcore can run in slices, and how it gets between the two.

[Note: Between head and loss]
These models call their head on the hidden states and hand what it returns to their ``loss_function``, with nothing in
between. While labels are given and gradients wanted, the head returns the summed loss in place of logits, computed
while its unit is open, and the loss function divides it as transformers does. The output's ``logits`` are then
``None``. Models that do something with logits in between (scale or cap them) can't be served so, hence a list of
those that don't. Without gradients everything is as transformers has it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from outcore.errors import ModelError
from outcore.model.closed import copied
from outcore.model.forwards import around_forward
from outcore.model.policies import Activations
from outcore.model.slices.loss import summed_cross_entropy

KNOWN = ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Classes of transformers whose forward was read for [Note: Between head and loss]."""


def slices_loss(model: nn.Module) -> bool:
    """Whether the model is one whose loss can run in slices."""
    return (
        type(model).__name__ in KNOWN
        and type(model).__module__.startswith("transformers.models.")
        and type(head := getattr(model, "lm_head", None)) is nn.Linear
        and "forward" not in vars(head)  # one of the user's own
        and getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    )


def asks_for_slices(model: nn.Module, activations: Activations) -> bool:
    """Whether a model, to which nothing was done yet, is to run its loss in slices: the policy asks, and it is known.

    Raises:
        ModelError: ``loss_slice`` is given for a model that isn't known.
    """
    if activations.loss_slice is None and activations.microbatch is None:
        return False
    if slices_loss(model):
        return True
    known = ", ".join(KNOWN)
    about = f"the loss of a {type(model).__name__} can't run in slices: outcore knows {known} of transformers"
    if activations.loss_slice is not None:
        raise ModelError(f"{about}; leave loss_slice out")
    if _has_vocabulary(model):  # of others nobody expects it
        warnings.warn(f"{about}; its head and loss see the batch whole", UserWarning, stacklevel=5)
    return False


def slice_loss(model: nn.Module, activations: Activations) -> Callable[[], None]:
    """Let a model of which `asks_for_slices` said so run its head and loss in slices.

    Returns:
        A function that undoes it.
    """
    return _SlicedLoss(model, activations).remove


def _has_vocabulary(model: Any) -> bool:
    """Whether it is a model of transformers that gives logits over a vocabulary."""
    find = getattr(model, "get_output_embeddings", None)
    return find is not None and find() is not None


@dataclass
class _Expected:
    """What the forward that runs was given."""

    labels: torch.Tensor
    shifted: torch.Tensor | None
    ignore_index: int
    count: torch.Tensor | None = None

    def targets(self) -> torch.Tensor:
        """The label of each position: the token after it."""
        if self.shifted is not None:
            return self.shifted
        return F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]


def runs_loss_in_slices(model: nn.Module) -> bool:
    """Whether the model was changed so that its loss runs in slices."""
    return isinstance(getattr(getattr(model, "loss_function", None), "__self__", None), _SlicedLoss)


class _SlicedLoss:
    """A model's hooks and replacements; see [Note: Between head and loss]."""

    def __init__(self, model: Any, activations: Activations) -> None:
        self._model = model
        self._head: Any = model.lm_head
        self._activations = activations
        self._expected: _Expected | None = None
        self._signature = inspect.signature(model.forward)
        self._loss = model.loss_function
        self._had_own = "_loss_function" in vars(model)
        self._undo_forward = around_forward(self._head, self._around)
        model.loss_function = self._divide
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._undo_forward()
        if self._had_own:
            self._model.loss_function = self._loss
        else:
            del self._model._loss_function

    def __reduce__(self) -> Any:
        raise copied()

    # -- around the model -------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._expected = None
        if not torch.is_grad_enabled():
            return
        try:
            given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        except TypeError:  # forward itself will say so
            return
        given.update(given.pop("kwargs", {}))
        labels = given.get("labels")
        if labels is not None:
            ignore_index = given.get("ignore_index", -100)
            self._expected = _Expected(labels, given.get("shift_labels"), ignore_index)

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        expected, self._expected = self._expected, None
        if expected is None or expected.count is None or output is None:
            return None
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    # -- in place of the model's own --------------------------------------------------------------

    def _around(self, logits: Callable[..., Any]) -> Callable[..., Any]:
        """The head's forward, which may be the user's own, where it gives logits."""
        self._logits = logits
        return lambda hidden: self._forward(hidden)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, or the sum of the losses."""
        expected, head = self._expected, self._head
        targets = None if expected is None else expected.targets()
        if (
            expected is None
            or targets is None
            or targets.shape != hidden.shape[:-1]
            or hidden.dtype is not head.weight.dtype
            or torch.is_autocast_enabled(hidden.device.type)
        ):
            logits: torch.Tensor = self._logits(hidden)
            return logits
        targets = targets.to(hidden.device).reshape(-1)
        expected.count = (targets != expected.ignore_index).sum()
        positions = self._activations.loss_slice
        if positions is None:
            assert self._activations.microbatch is not None
            positions = self._activations.microbatch * hidden.shape[-2]
        flat = hidden.reshape(-1, hidden.shape[-1])
        keeps = self._activations.logits == "keep"
        return summed_cross_entropy(
            flat, head.weight, head.bias, targets, expected.ignore_index, positions, keeps
        )

    def _divide(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The loss of transformers: a mean over the labels that count, or over a number that was given."""
        expected = self._expected
        if expected is None or expected.count is None:
            loss: torch.Tensor = self._loss(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
            return loss
        if num_items_in_batch is None:
            return logits / expected.count
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(logits.device)
        return logits / num_items_in_batch
