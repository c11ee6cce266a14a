"""Looking at the part of an autograd graph that one call of a module made.

Nodes are numbered in the order of their creation, so the nodes of a call are those reachable from its outputs
with a number not below the one that was next when it began.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import Node


def next_sequence_number() -> int:
    """The number of the node that is made next in this thread: above those of all made so far."""
    return int(torch._C._autograd._get_sequence_nr())


def own_outputs(outputs: Iterable[torch.Tensor], first: int) -> list[torch.Tensor]:
    """The outputs that the call computed, not those that it passed on from its inputs."""
    return [t for t in outputs if t.grad_fn is not None and t.grad_fn._sequence_nr() >= first]


def reaches_beyond(outputs: Iterable[torch.Tensor], first: int, known: Iterable[torch.Tensor]) -> bool:
    """Whether gradients would leave the call elsewhere than at tensors that are known: its leaves, its parameters."""
    inside = {id(tensor) for tensor in known}
    for node in last_nodes(outputs, first):
        for following, _ in node.next_functions:
            if following is None:
                continue
            variable = getattr(following, "variable", None)
            if (variable is None and following._sequence_nr() < first) or (
                variable is not None and id(variable) not in inside
            ):
                return True
    return False


def last_nodes(outputs: Iterable[torch.Tensor], first: int) -> list[Node]:
    """The nodes with an edge out of the call: to what made its inputs, or to a parameter.

    Every node of the call that leads to an output runs before some of these, so once they have run, all have.
    """
    return nodes_of(outputs, first)[0]


def nodes_of(outputs: Iterable[torch.Tensor], first: int) -> tuple[list[Node], int]:
    """Those nodes, and how many of the call lead to an output."""
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    last = []
    while stack:
        node = stack.pop()
        leads_out = False
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable") or following._sequence_nr() < first:
                leads_out = True
            elif following not in seen:
                seen.add(following)
                stack.append(following)
        if leads_out:
            last.append(node)
    return last, len(seen)
