"""The text files that ``--data`` means."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outcore.errors import UsageError

STDLIB = "stdlib"
"""The word for the source files of the running Python's standard library."""

SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *(
            "cfg",
            "csv",
            "htm",
            "html",
            "ini",
            "json",
            "jsonl",
            "md",
            "rst",
            "tex",
            "text",
            "toml",
            "tsv",
            "txt",
        ),
        *(
            "xml",
            "yaml",
            "yml",
            "c",
            "cc",
            "cpp",
            "cs",
            "css",
            "cu",
            "go",
            "h",
            "hpp",
            "java",
            "jl",
            "js",
            "lua",
        ),
        *("php", "pl", "py", "pyi", "r", "rb", "rs", "scala", "sh", "sql", "swift", "ts"),
    )
)
"""What counts as text inside a folder. A file that is named itself may be called anything."""

PIECE = 1 << 18
"""Characters that are read and tokenized at once, so that a large file is never in memory as a whole."""

_NOT_ITS_OWN = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})


@dataclass
class Texts:
    """Text files in a fixed order.

    Attributes:
        paths: files found, sorted within each thing that was named.
        named: those that the user named themselves: they must be readable.
        skipped: files found in folders that turned out, on reading, not to be UTF-8 text.
    """

    paths: list[Path]
    named: set[Path]
    skipped: int = field(default=0, init=False)

    @classmethod
    def find(cls, given: Sequence[str]) -> Texts:
        """Look up files, folders (with all folders in them) and the word ``stdlib``.

        Raises:
            UsageError: something named is missing or unreadable, or there is no text file.
        """
        found: dict[Path, None] = {}
        named = set()
        for name in given:
            path = Path(name).expanduser()
            if name == STDLIB and not path.exists():
                found.update(
                    dict.fromkeys(_inside(Path(sysconfig.get_paths()["stdlib"]), frozenset({".py"})))
                )
            elif path.is_dir():
                found.update(dict.fromkeys(_inside(path, SUFFIXES)))
            elif path.exists():
                _check_readable(path)
                found[path] = None
                named.add(path)
            else:
                raise UsageError(
                    f"no such file or folder: {name} (the word {STDLIB!r} means Python's own library)"
                )
        if not found:
            raise UsageError(f"no text files in {', '.join(given)}")
        return cls(list(found), named)

    def read(self, share: float = 1.0) -> Iterator[tuple[str, bool]]:
        """The text in pieces, each with whether it is the last of its file.

        Pieces end where a line ends, if they can. Files in folders that are not text are passed over, from
        the piece on where that shows, and counted.

        Args:
            share: the part of each file's beginning to read.

        Raises:
            UsageError: a file that was named can't be read or is not UTF-8 text.
        """
        self.skipped = 0
        for path in self.paths:
            try:
                yield from _pieces(path, share)
            except (OSError, UnicodeDecodeError) as error:
                if path in self.named:
                    raise UsageError(f"{path} can't be read as text: {_reason(error)}") from None
                self.skipped += 1


def _pieces(path: Path, share: float) -> Iterator[tuple[str, bool]]:
    left = int(path.stat().st_size * share) + 1
    with path.open(encoding="utf-8", newline="") as file:
        piece = file.read(min(PIECE, left))
        while piece:
            left -= len(piece)
            if left > 0 and not piece.endswith("\n"):
                piece += file.readline(PIECE)
            following = file.read(min(PIECE, left)) if left > 0 else ""
            yield piece, not following
            piece = following


def _inside(folder: Path, suffixes: frozenset[str]) -> Iterator[Path]:
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"the folder {folder} can't be read: no permission")
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in _NOT_ITS_OWN and not f.startswith("."))
        for file in sorted(files):
            path = Path(where, file)
            if path.suffix.lower() in suffixes and path.is_file():
                yield path


def _check_readable(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"{path} is neither a file nor a folder")
    try:
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"{path} can't be read: {_reason(error)}") from None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return error.strerror or str(error)
