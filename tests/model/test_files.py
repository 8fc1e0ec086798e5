"""Files that are replaced whole, corpora of lines, and the card of a checkpoint."""

import gzip
import os
import re
import unicodedata
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.export.manifest import Line
from dragoman.model.card import (
    CARD_FILE,
    MAX_CARD_BYTES,
    MAX_DOMAIN_CHARACTERS,
    CardError,
    domain_of,
    is_of_one_sentence,
    plain,
    read_card,
)
from dragoman.model.corpus import DataError, read_lines, read_parallel, write_lines
from dragoman.model.decode import pad
from dragoman.model.files import replaced, write_text


def test_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "eins\nzwei ü\r\n")
    assert path.read_bytes() == "eins\nzwei ü\r\n".encode()
    with pytest.raises(RuntimeError), replaced(path) as temporary:
        temporary.write_text("ne", encoding="utf-8")
        raise RuntimeError
    with replaced(path) as temporary:
        temporary.write_text("new", encoding="utf-8")
        assert path.read_bytes() == "eins\nzwei ü\r\n".encode()
    assert path.read_text(encoding="utf-8") == "new" and [file.name for file in tmp_path.iterdir()] == ["a.json"]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_lines_are_kept_as_they_are(tmp_path: Path, name: str) -> None:
    lines = ["one", "", " two \u2028 still two", "vier\x0b\x0c ü"]
    write_lines(tmp_path / name, iter(lines))
    assert read_lines(tmp_path / name) == lines
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert read_lines(write(tmp_path / "a", b"\xef\xbb\xbfone\r\n\ntwo")) == ["one", "", "two"]


PACKED = gzip.compress(bytes(range(256)) * 20, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, ": No such file or directory"),
        (".", None, ": Is a directory"),
        ("a", b"", ": the file is empty"),
        ("a.gz", gzip.compress(b"", mtime=0), ": the file is empty"),
        ("a", b"good\nba\xe9d\n", ", line 2: not UTF-8: invalid continuation byte at byte 2"),
        ("a.gz", b"plain text", ": "),
        ("a.gz", PACKED[: len(PACKED) // 2], ": "),
        ("a.gz", PACKED[:-6] + b"\0" * 6, ": "),
        ("a.gz", PACKED[:20] + b"\xff" * 40 + PACKED[60:], ": "),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(DataError, match="^" + re.escape(f"{tmp_path / name}{message}")):
        read_lines(tmp_path / name)


def test_parallel_text_has_as_many_lines_and_no_blank_ones(tmp_path: Path) -> None:
    source, target = write(tmp_path / "s", b"a\nb\n"), write(tmp_path / "t", b"x\ny")
    assert read_parallel(source, target) == (["a", "b"], ["x", "y"])
    assert pad([[5], [6, 7, 8], []], 9).tolist() == [[5, 9, 9], [6, 7, 8], [9, 9, 9]]
    write(target, b"x\n")
    with pytest.raises(DataError, match="^" + re.escape(f"{source} has 2 lines but {target} has 1")):
        read_parallel(source, target)
    for blank, other in ((source, target), (target, source)):
        write(blank, b"a\nb\n \t\n")
        write(other, b"a\nb\nc\n")
        with pytest.raises(DataError, match="^" + re.escape(f"{blank}, line 3: the line is blank")):
            read_parallel(source, target)


def domain(directory: Path, card: str | bytes) -> str:
    (directory / CARD_FILE).write_bytes(card if isinstance(card, bytes) else card.encode())
    return domain_of(read_card(directory))


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("# en-de\n\nDomain: captions of photographs\n\nMore.", "captions of photographs"),
        ("---\nlicense: mit\ndomain: 'news, 2010 to 2020'\n---\n# x", "news, 2010 to 2020"),
        ('\ufeff---\r\ndomain: "law"\r\n---\r\n', "law"),
        (
            "**Domain:** _medical_ `letters`, see [a list](https://x.org/y) <br>of <b>wards</b>",
            "medical letters, see a list of wards",
        ),
        ("__Domain__: talks", "talks"),
        ("DOMAIN:\ttalks  by   many", "talks by many"),
        ("Domain: first\nDomain: second", "first"),
        ("domain: >-\n  folded\n\nDomain: plain", "plain"),
        ("```\nDomain: an example\n```\nDomain: the truth", "the truth"),
        ("Domain: 字幕 और समाचार", "字幕 और समाचार"),
        ("Its domain: none at all", ""),
        ("Domain:\nDomain: \nDomain: ...\nDomains: many", ""),
        ("", ""),
    ],
)
def test_the_first_line_that_names_a_domain_counts(tmp_path: Path, card: str, expected: str) -> None:
    assert domain(tmp_path, card) == expected


def test_a_line_of_a_card_says_that_the_model_knows_one_sentence_at_a_time() -> None:
    for card in ("# x\n\nSentences: one at a time", "**sentences:** One at a time. Of several it leaves some out."):
        assert is_of_one_sentence(card)
    for card in ("", "Sentences: many", "Its sentences: one at a time", "```\nSentences: one at a time\n```"):
        assert not is_of_one_sentence(card)


def test_no_card_is_no_domain_and_an_unreadable_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_card(tmp_path) == "" == read_card(tmp_path / "none") == domain_of("")
    (tmp_path / CARD_FILE).mkdir()
    assert read_card(tmp_path) == ""
    (tmp_path / CARD_FILE).rmdir()
    os.mkfifo(tmp_path / CARD_FILE)
    assert read_card(tmp_path) == "", "a pipe that nobody writes into is not waited for"
    (tmp_path / CARD_FILE).unlink()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    domain(tmp_path, "Domain: x")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CardError, match=re.escape(f"{tmp_path / CARD_FILE}: Permission denied")):
        read_card(tmp_path)


@given(st.text(st.sampled_from("ab \t\n\r\x00\x1b\x9b\u200f\u2028\u202e\u2066<>[]()*_`\"'!é字")) | st.text())
def test_what_comes_of_any_text_is_one_harmless_line_that_a_bundle_takes(text: str) -> None:
    found = plain(text)
    assert len(found) <= MAX_DOMAIN_CHARACTERS
    assert not any(unicodedata.category(character)[0] == "C" for character in found)
    assert found == " ".join(found.split()) and not set(found) & set("<>`*")
    assert msgspec.convert(found, Line) == found


def test_card_of_any_bytes_and_any_size_is_borne(tmp_path: Path) -> None:
    assert domain(tmp_path, b"Domain: caf\xe9 talk\n") == "caf\ufffd talk"
    assert domain(tmp_path, os.urandom(1 << 20)) is not None and len(read_card(tmp_path).encode()) <= MAX_CARD_BYTES
    assert domain(tmp_path, "Domain: " + "<" * (1 << 22)) == ""
    assert domain(tmp_path, "x\n" * (1 << 20) + "Domain: too far down") == ""
    found = domain(tmp_path, "Domain: " + "many words " * 100)  # a long one ends after a word
    assert len(found) <= MAX_DOMAIN_CHARACTERS and re.fullmatch("(many words )+many( words)?…", found)
    assert domain(tmp_path, "Domain: " + "x" * 900) == "x" * (MAX_DOMAIN_CHARACTERS - 1) + "…"
