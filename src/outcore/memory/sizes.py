"""Sizes in bytes, as people write and read them.

`parse_size` reads ``"14GiB"``, ``"1.5 GiB"``, ``"400GB"`` or a plain number of bytes. IEC units (KiB, MiB,
GiB, TiB, PiB, or Ki, Mi, ...) are powers of 1024 and SI units (kB, MB, GB, TB, PB) are powers of 1000. A
bare letter (``"14G"``) means the IEC unit, because that is how memory is sold and how `docker -m`, `dd`
and `java -Xmx` read it. Upper and lower case are the same.
"""

from __future__ import annotations

import re
from fractions import Fraction

from outcore.errors import SizeError

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?:([kmgtp])(ib|i|b)?|b|bytes?)?\s*", re.I | re.A)
_PREFIXES = "kmgtp"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LIMIT = 2**63 - 1
"""The largest file offset and address there is."""


def parse_size(text: str | int) -> int:
    """Bytes that a size stands for, rounded down to whole bytes.

    Args:
        text: such as ``"14GiB"``, ``"1.5 GiB"``, ``"400GB"``, ``"14G"`` (GiB); a whole number is bytes.

    Raises:
        SizeError: it is not a size, or not above zero.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        nbytes = text
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) and len(text) < 64 else None
        if match is None:
            raise SizeError(f"{text!r} is not a size: write bytes or a number with a unit, such as '14GiB'")
        number, prefix, ending = match.groups()
        base = 1000 if (ending or "").lower() == "b" else 1024
        power = 0 if prefix is None else _PREFIXES.index(prefix.lower()) + 1
        nbytes = int(Fraction(number) * base**power)
    if nbytes <= 0:
        raise SizeError(f"the size {text!r} must be at least one byte, for example '14GiB'")
    if nbytes > _LIMIT:
        raise SizeError(f"the size {text!r} is beyond what a machine can address; did you mean '14GiB'?")
    return nbytes


def format_size(nbytes: int) -> str:
    """A size for people, in IEC units with one decimal: ``"14.0 GiB"``, ``"512 B"``."""
    sign = "-" if nbytes < 0 else ""
    tenths = abs(nbytes) * 10.0
    if tenths < 10240:
        return f"{sign}{abs(nbytes)} B"
    for unit in _UNITS[1:]:
        tenths /= 1024
        if round(tenths) < 10240 or unit == _UNITS[-1]:
            break
    return f"{sign}{round(tenths) / 10:.1f} {unit}"
