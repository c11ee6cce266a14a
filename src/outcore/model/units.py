"""Which parameters are fetched together.

[Note: Units]
A *unit* is what one fetch brings: a transformer block, the embedding, the head. Blocks are the children of
the outermost ``ModuleList`` or ``Sequential`` on each path from the root. What surrounds them falls into
subtrees without blocks (an embedding with its norm, a pooler, a head); each is a unit too. A module on the
way that owns parameters itself (a class token, a scale) makes a unit of just those, open while the module
runs.

A parameter belongs to the unit that registers it first; every other module that uses the same
parameter (tied weights) opens that unit as well. `Point` says, for each module with hooks, what it opens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from outcore.errors import ModelError


@dataclass(frozen=True)
class UnitPlan:
    """A unit to be: the module it comes from and the parameters it owns, by their full names.

    ``whole``: it owns the parameters of the whole subtree, not of the module alone.
    """

    name: str
    module: nn.Module
    whole: bool
    parameters: tuple[tuple[str, nn.Parameter], ...]


@dataclass(frozen=True)
class Point:
    """A module whose call opens units, by number. ``block``: one of a sequence, and so worth recomputing."""

    name: str
    module: nn.Module
    units: tuple[int, ...]
    block: bool


@dataclass(frozen=True)
class _Scope:
    """A module whose call covers some parameters."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    whole: bool
    block: bool


def discover(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[list[UnitPlan], list[Point]]:
    """Divide a model in units.

    Args:
        model: any module.
        patterns: names of modules that are units, as shell patterns (``"layers.*"``). What they leave is
            divided by the rule of [Note: Units].

    Raises:
        ModelError: a pattern names no module, named modules lie within each other, or a parameter has no shape yet.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name} has no shape before the first forward: call the model once on a batch, then make the "
                "optimizer and offload it"
            )
    named = _named(model, patterns)
    owner: dict[nn.Parameter, int] = {}
    units: list[UnitPlan] = []
    points: list[Point] = []
    hooked: set[nn.Module] = set()
    for scope in _scopes(model, "", named):
        if scope.module in hooked:  # one module under two names
            continue
        hooked.add(scope.module)
        own = tuple((name, p) for name, p in scope.parameters if p not in owner)
        if own:
            owner.update((p, len(units)) for _, p in own)
            units.append(UnitPlan(scope.name or "(root)", scope.module, scope.whole, own))
        opened = sorted({owner[p] for _, p in scope.parameters})
        if opened:
            points.append(Point(scope.name or "(root)", scope.module, tuple(opened), scope.block))
    return units, points


def _named(model: nn.Module, patterns: Sequence[str] | None) -> set[nn.Module]:
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns or ():
        hits = {name: m for name, m in model.named_modules() if name and fnmatchcase(name, pattern)}
        if not hits:
            raise ModelError(f"no module of the model is named {pattern!r}")
        for name, module in hits.items():
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                raise ModelError(
                    f"{name!r} can't be a unit: nobody calls a {type(module).__name__}; name its children"
                )
            if not any(name.startswith(other + ".") for other in hits):  # "layers.*" means the layers
                chosen[name] = module
    for name in chosen:
        for other in chosen:
            if other.startswith(name + "."):
                raise ModelError(f"units can't lie within each other: {other!r} is inside {name!r}")
    return set(chosen.values())


def _scopes(module: nn.Module, name: str, named: set[nn.Module]) -> Iterator[_Scope]:
    if module in named or not _has_blocks(module, named):
        if name or _direct(module, ""):
            yield _Scope(name, module, _all(module, name), True, module in named)
        else:  # a root without blocks and without parameters of its own: its children are the units
            for child_name, child in module.named_children():
                yield from _scopes(child, child_name, named)
        return
    direct = _direct(module, name)
    if direct:
        yield _Scope(name, module, direct, False, False)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            continue
        if _is_sequence(module) and not _contains(child, named):
            parameters = _all(child, path)
            if parameters:
                yield _Scope(path, child, parameters, True, True)
        else:
            yield from _scopes(child, path, named)


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))


def _has_blocks(module: nn.Module, named: set[nn.Module]) -> bool:
    return any((_is_sequence(m) and _many(m)) or (m in named and m is not module) for m in module.modules())


def _many(module: nn.Module) -> bool:
    """A sequence counts if two or more of its children own parameters, or if it can't be called itself."""
    owners = sum(any(True for _ in child.parameters()) for child in module.children())
    return owners > 1 or (owners == 1 and not isinstance(module, nn.Sequential))


def _contains(module: nn.Module, named: set[nn.Module]) -> bool:
    return any(m in named for m in module.modules())


def _direct(module: nn.Module, name: str) -> tuple[tuple[str, nn.Parameter], ...]:
    """The parameters a module owns itself, including those in lists of parameters, which are never called."""
    prefix = f"{name}." if name else ""
    found = [(prefix + n, p) for n, p in module.named_parameters(recurse=False)]
    for child_name, child in module.named_children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            found += [(f"{prefix}{child_name}.{n}", p) for n, p in child.named_parameters()]
    return tuple(found)


def _all(module: nn.Module, name: str) -> tuple[tuple[str, nn.Parameter], ...]:
    prefix = f"{name}." if name else ""
    return tuple((prefix + n, p) for n, p in module.named_parameters())
