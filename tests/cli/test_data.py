"""Text files, tokens and windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from calling import text

from outcore.cli.batches import Batches
from outcore.cli.files import PIECE, Texts
from outcore.cli.tokens import Trained, token_file
from outcore.errors import UsageError


def read(texts: Texts) -> str:
    return "".join(piece for piece, _ in texts.read())


def test_folders_are_read_in_order_and_through(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "no.txt").write_text("no")
    assert read(Texts.find([str(tmp_path)])) == "onetwo"


def test_files_in_folders_that_are_not_text_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"# \xff\xfe")
    (tmp_path / "good.py").write_text("x = 1")
    texts = Texts.find([str(tmp_path)])
    assert read(texts) == "x = 1"
    assert texts.skipped == 1


def test_a_file_that_is_named_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"# \xff\xfe")
    with pytest.raises(UsageError, match="it is not UTF-8"):
        read(Texts.find([str(tmp_path / "bad.py")]))


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = str(text(tmp_path))
    assert len(Texts.find([path, path]).paths) == 1


def test_large_files_come_in_pieces_that_end_with_lines(tmp_path: Path) -> None:
    whole = "".join(f"line {k} é\n" for k in range(60_000))
    (tmp_path / "large.txt").write_text(whole, encoding="utf-8")
    pieces = list(Texts.find([str(tmp_path)]).read())
    assert "".join(piece for piece, _ in pieces) == whole
    assert len(pieces) == len(whole) // PIECE + 1
    assert all(piece.endswith("\n") for piece, _ in pieces)
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_share_reads_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    assert "".join(piece for piece, _ in Texts.find([str(tmp_path)]).read(0.5)) == "012345"


def test_the_standard_library_is_a_word() -> None:
    texts = Texts.find(["stdlib"])
    names = {path.name for path in texts.paths}
    assert "textwrap.py" in names
    assert not any("site-packages" in path.parts for path in texts.paths)


def test_tokens_give_the_text_back(tmp_path: Path) -> None:
    texts = Texts.find([str(text(tmp_path))])
    tokenizer = Trained(texts, 512)
    tokens = token_file(texts, tokenizer, 512, lambda done: None)
    assert tokens.dtype == np.uint16
    assert tokens[-1] == tokenizer.end
    assert tokenizer.backend.decode(tokens[:-1].tolist()) == read(texts)


def test_training_a_tokenizer_is_deterministic(tmp_path: Path) -> None:
    texts = Texts.find([str(text(tmp_path))])
    one, two = Trained(texts, 320), Trained(texts, 320)
    assert one.size == 320
    assert one.backend.to_str() == two.backend.to_str()


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    texts = Texts.find([str(text(tmp_path))])
    tokenizer = Trained(texts, 400)
    with pytest.raises(UsageError, match="knows only 300"):
        token_file(texts, tokenizer, 300, lambda done: None)


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 257"):
        Trained(Texts.find([str(text(tmp_path))]), 100)


def test_batches_are_the_same_for_a_seed_and_cover_an_epoch() -> None:
    tokens = np.arange(10 * 8 + 3, dtype=np.uint16)
    one, two, other = (Batches(tokens, 8, 2, seed) for seed in (1, 1, 2))
    rows = [one.next() for _ in range(5)]
    assert all(np.array_equal(row, two.next()) for row in rows)
    assert not all(np.array_equal(row, other.next()) for row in rows)
    assert sorted(np.concatenate(rows)[:, 0]) == list(range(0, 80, 8))
    assert not all(np.array_equal(row, one.next()) for row in rows)  # the next epoch is shuffled anew


def test_batches_go_on_where_they_were() -> None:
    tokens = np.arange(7 * 4, dtype=np.uint32)
    batches = Batches(tokens, 4, 3, seed=0)
    for _ in range(4):
        batches.next()
    state = batches.state()
    expected = [batches.next() for _ in range(6)]
    again = Batches(tokens, 4, 3, seed=5)
    again.restore(state)
    assert all(np.array_equal(row, again.next()) for row in expected)


def test_a_state_of_other_data_is_refused() -> None:
    batches = Batches(np.arange(16), 4, 1, seed=0)
    with pytest.raises(UsageError, match="beyond the 4 windows"):
        batches.restore({"seed": 0, "epoch": 0, "position": 5})


def test_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="only 7 tokens"):
        Batches(np.arange(7), 8, 1, seed=0)
