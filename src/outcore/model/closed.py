"""What may be done with a parameter whose values are elsewhere.

[Note: Closed parameters]
While its unit is closed a parameter shows something that stands for it. Code outside of modules can still put it into a
graph (a penalty on all weights), and what comes out is a NaN, or the right number with a wrong gradient. So a closed
parameter is the same object of another class, which torch tells of everything that is done with it: what asks how it
is (shape, dtype, gradient) is answered, what would make it part of a graph is refused by name. An open one is an
ordinary parameter again: nothing is looked at within a forward. Where parameters are of a class of their own they stay
what they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from outcore.errors import ModelError, StateError
from outcore.model.unit import Unit

Read = Callable[[], None]
"""Called before the value of a closed parameter is looked at: brings it, or refuses."""

_ATTRIBUTES = (
    *(
        "dtype",
        "device",
        "shape",
        "ndim",
        "layout",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
        "retains_grad",
    ),
    *(
        "output_nr",
        "itemsize",
        "nbytes",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_xla",
        "is_sparse",
        "is_quantized",
    ),
    *("is_nested", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *(
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "element_size",
        "data_ptr",
        "untyped_storage",
    ),
    *(
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_pinned",
        "is_shared",
        "requires_grad_",
    ),
    *("register_hook", "register_post_accumulate_grad_hook"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
)

_QUIET = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__set__ for name in ("data", "grad", "requires_grad")]
    + [getattr(torch.Tensor, "grad").__delete__]  # noqa: B009, for torch's stubs don't know what this is
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [getattr(torch, name + "_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn")]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type]
)
"""What doesn't look at values."""

_AS = frozenset(
    getattr(torch.Tensor, name) for name in ("view_as", "expand_as", "reshape_as", "type_as", "to")
)
"""What looks at those of the first argument alone."""


class Closed(nn.Parameter):
    """A parameter whose unit is closed; see [Note: Closed parameters]."""

    _outcore: tuple[str, weakref.WeakMethod[Any] | None, tuple[Any, ...]]
    """Its name, and what is told, with which arguments, before its value is looked at."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _QUIET:
                return func(*args, **kwargs)
            if func is torch.Tensor.to and func(*args, **kwargs) is args[0]:
                return args[0]  # the model is told to go where it is
            looked_at = args[:1] if func in _AS else (args, kwargs)
            closed = [leaf for leaf in tree_leaves(looked_at) if type(leaf) is cls]
            for parameter in closed:
                parameter._look()
            found = func(*args, **kwargs)
            if closed and any(
                isinstance(t, torch.Tensor) and t.grad_fn is not None for t in tree_leaves(found)
            ):
                raise used_outside(closed[0]._outcore[0])
            return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise copied()

    def __deepcopy__(self, memo: Any) -> Any:
        raise copied()

    def _look(self) -> None:
        _, told, arguments = self._outcore
        read = None if told is None else told()
        if read is not None:
            read(*arguments)


def copied() -> StateError:
    """What to raise where a model or a parameter would be copied without its values."""
    return StateError(
        "an offloaded model can't be copied or pickled, its parameters are elsewhere: use outcore.weights(model)"
    )


def used_outside(name: str) -> ModelError:
    """What to raise where a parameter is used while its values are elsewhere."""
    return ModelError(
        f"the parameter {name} was used outside of the module that owns it: name a module that covers its use as a "
        "unit, offload(..., units=[...]), or compute a penalty on parameters in a forward or in outcore.gather(model), "
        "or give the optimizer weight_decay"
    )


def stand(parameter: nn.Parameter, name: str, told: Any = None, *arguments: Any) -> Callable[[], None]:
    """From now on a parameter is `Closed` whenever its unit is, which it is now.

    Args:
        told: a method that is called with ``arguments`` before its value is looked at. Whose it is, is not kept alive.

    Returns:
        A function that undoes it.
    """
    if type(parameter) is not nn.Parameter:
        return lambda: None
    vars(parameter)["_outcore"] = (name, None if told is None else weakref.WeakMethod(told), arguments)
    _become(parameter, Closed)

    def undo() -> None:
        if type(parameter) is Closed:
            _become(parameter, nn.Parameter)
        vars(parameter).pop("_outcore", None)

    return undo


def closed(unit: Unit) -> None:
    """The unit's parameters have lost their values."""
    for binding in unit.bindings:
        if type(binding.parameter) is nn.Parameter and "_outcore" in vars(binding.parameter):
            _become(binding.parameter, Closed)


def opened(unit: Unit) -> None:
    """The unit's parameters are about to have their values."""
    for binding in unit.bindings:
        if type(binding.parameter) is Closed:
            _become(binding.parameter, nn.Parameter)


def directly() -> Any:
    """Inside, closed parameters are asked without being told of it, which takes a hundredth of the time."""
    return torch._C.DisableTorchFunctionSubclass()


def _become(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    parameter.__class__ = kind  # as torch does with what was lazy
