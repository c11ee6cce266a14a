"""Text to tokens: the model's tokenizer, or one trained on the data, and a file of token numbers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outcore.cli.files import PIECE, Texts
from outcore.errors import CheckpointError, DiskWriteError, UsageError

SAMPLE = 4 << 20
"""Characters of the data on which a tokenizer is trained; more change it little and cost memory."""

LARGEST = 16384
"""The most entries of a tokenizer trained on that sample: rarer pieces are used too seldom to be learnt."""

END = "<|endoftext|>"
"""Comes after each file."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode_pieces(self, pieces: list[str]) -> Iterable[list[int]]:
        """The tokens of each piece, nothing added."""

    def files(self) -> dict[str, str]:
        """Its files by name, for a checkpoint."""

    @property
    def end(self) -> int | None:
        """The token after each file."""


class Trained:
    """A byte-level byte-pair encoding (Sennrich et al. 2016), trained on the data itself."""

    def __init__(self, texts: Texts, vocabulary: int) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        size = min(vocabulary, LARGEST)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if size <= len(alphabet):
            raise UsageError(
                f"the model has no tokenizer, and its vocabulary of {vocabulary} is too small "
                f"for one on bytes: at least {len(alphabet) + 1} are needed"
            )
        self.backend = Backend(models.BPE())
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            show_progress=False,
            special_tokens=[END],
            initial_alphabet=sorted(alphabet),
        )
        self.backend.train_from_iterator(_sample(texts), trainer)

    @classmethod
    def kept(cls, text: str) -> Trained:
        """One that a checkpoint kept, as `files` gave it.

        Raises:
            CheckpointError: it is none.
        """
        from tokenizers import Tokenizer as Backend

        made = cls.__new__(cls)
        try:
            made.backend = Backend.from_str(text)
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"the checkpoint's tokenizer can't be read: {error}") from None
        return made

    def files(self) -> dict[str, str]:
        """Its files by name, as transformers would save them."""
        from transformers import PreTrainedTokenizerFast

        whole = PreTrainedTokenizerFast(tokenizer_object=self.backend, eos_token=END)
        return {**_saved(whole), "tokenizer.json": self.backend.to_str()}

    def encode_pieces(self, pieces: list[str]) -> Iterable[list[int]]:
        return [found.ids for found in self.backend.encode_batch_fast(pieces, add_special_tokens=False)]

    @property
    def end(self) -> int | None:
        end = self.backend.token_to_id(END)
        return None if end is None else int(end)

    @property
    def size(self) -> int:
        """Entries."""
        return int(self.backend.get_vocab_size())

    def save(self, path: Path) -> None:
        """Write it as a ``tokenizer.json``, which transformers and tokenizers read."""
        self.backend.save(str(path))


class Given:
    """The tokenizer that came with a model."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def files(self) -> dict[str, str]:
        """Its files by name."""
        return _saved(self.tokenizer)

    def encode_pieces(self, pieces: list[str]) -> Iterable[list[int]]:
        found: list[list[int]] = self.tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    @property
    def end(self) -> int | None:
        end = self.tokenizer.eos_token_id
        return None if end is None else int(end)


def token_file(texts: Texts, tokenizer: Tokenizer, vocabulary: int, said: Callable[[int], None]) -> Any:
    """All texts as one row of token numbers, in a file without a name that is mapped into memory.

    The file goes where temporary files go (``TMPDIR``), and away with the array.

    Args:
        vocabulary: of the model; a token beyond it is an error.
        said: told the characters that are done, from time to time.

    Returns:
        A read-only array of uint16 or uint32, shape (tokens,).

    Raises:
        UsageError: the tokenizer doesn't belong to the model.
        DiskWriteError: the file can't be written.
    """
    dtype: npt.DTypeLike = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    count = 0
    try:
        with tempfile.TemporaryFile(prefix="outcore-tokens-") as file:
            for part in _encoded(texts, tokenizer, said):
                if len(part) and int(part.max()) >= vocabulary:
                    raise UsageError(
                        f"the tokenizer gives token {int(part.max())}, but the model knows only "
                        f"{vocabulary}: they don't belong together"
                    )
                part.astype(dtype).tofile(file)
                count += len(part)
            file.flush()
            if count == 0:
                return np.empty(0, dtype)
            return np.memmap(file, dtype=dtype, mode="r", shape=(count,))
    except OSError as error:
        raise DiskWriteError(
            f"the tokens can't be written to {tempfile.gettempdir()}: {error.strerror or error}; "
            "set TMPDIR to a directory with more room"
        ) from None


def _encoded(
    texts: Texts, tokenizer: Tokenizer, said: Callable[[int], None]
) -> Iterator[npt.NDArray[np.int64]]:
    batch: list[str] = []
    ends: list[bool] = []
    waiting = done = 0
    end = [] if tokenizer.end is None else [tokenizer.end]

    def flush() -> npt.NDArray[np.int64]:
        rows = zip(tokenizer.encode_pieces(batch), ends, strict=True)
        return np.concatenate([np.asarray(row + (end if last else []), np.int64) for row, last in rows])

    for piece, last in texts.read():
        batch.append(piece)
        ends.append(last)
        waiting += len(piece)
        if waiting >= 4 * PIECE:
            yield flush()
            done += waiting
            said(done)
            batch, ends, waiting = [], [], 0
    if batch:
        yield flush()
        said(done + waiting)


def _saved(tokenizer: Any) -> dict[str, str]:
    """The files of a transformers tokenizer that are text, which those of a fast one are."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="outcore-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            with contextlib.suppress(UnicodeDecodeError, OSError):
                found[path.name] = path.read_text(encoding="utf-8")
    return found


def _sample(texts: Texts) -> Iterator[str]:
    """The same share of the beginning of each file."""
    total = max(1, sum(path.stat().st_size for path in texts.paths))
    return (piece for piece, _ in texts.read(min(1.0, SAMPLE / total)))
