"""HTML and SVG from Python, in which text can't become markup.

[Note: Escaping]
A page shows names that others chose: of models, directories, modules. So nothing is formatted into HTML by hand.
`tag` escapes every string that is not `Markup`, and only `tag`, `join` and the page's own assets make `Markup`. Should
that fail all the same, the page's content security policy runs one script only, known by its digest, and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]
Attribute = str | int | float | bool | None

_VOID = frozenset({"meta", "input", "br", "rect", "line", "path", "polyline", "circle"})


def tag(element: str, *children: Child, **attributes: Attribute) -> Markup:
    """An element.

    Args:
        element: its name, from code.
        children: text, which is escaped, or `Markup`, or several of these; ``None`` is nothing.
        attributes: ``_`` in a name stands for ``-``, and one at its end is for Python's keywords. ``None`` and
            ``False`` leave an attribute out.
    """
    parts = [f"<{element}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{escape(_text(value), quote=True)}"')
    if element in _VOID and not children:
        return Markup("".join(parts) + "/>")
    return Markup("".join(parts) + ">" + join(children) + f"</{element}>")


def join(children: Iterable[Child]) -> Markup:
    """Several pieces, one after the other."""
    return Markup("".join(_child(child) for child in children))


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child, quote=False)
    if isinstance(child, int | float):
        return _text(child)
    return join(child)


def _text(value: str | int | float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
