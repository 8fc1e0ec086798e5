"""Sentences, lines and cuts; large texts of callers on the event loop: one slice in turn, however many callers there are."""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.service.sentences import SLICE_SECONDS, Slices, cut_text, has_several, split_text


def sentences(text: str) -> list[str]:
    return [piece for piece, is_translated in split_text(text) if is_translated]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A dog runs. A cat sleeps! Does it? Yes.", ["A dog runs.", "A cat sleeps!", "Does it?", "Yes."]),
        ("  A dog.\n\n\tA cat\r\n", ["A dog.", "A cat"]),
        ("Dr. Smith met J. S. Bach, e.g. Mr. X, in the U.S. Army.", ["Dr. Smith met J. S. Bach, e.g. Mr. X, in the U.S. Army."]),
        ("Am 3. Mai 1990. Danach z. B. Brot. Usw. Ende.", ["Am 3. Mai 1990.", "Danach z. B. Brot.", "Usw. Ende."]),
        ('"Go!" He went (home). "Why?" asked she… No.', ['"Go!"', "He went (home).", '"Why?" asked she…', "No."]),
        ("It costs 3.50 at www.example.org. ¿Qué? «Oui.» Non.", ["It costs 3.50 at www.example.org.", "¿Qué?", "«Oui.»", "Non."]),
        ("犬です。猫です！「はい。」そう", ["犬です。", "猫です！", "「はい。」", "そう"]),
        (
            "He said no. Look at me. See p. 5, art. 3 of vol. II. I like art. 5 is odd.",
            ["He said no.", "Look at me.", "See p. 5, art. 3 of vol.", "II.", "I like art. 5 is odd."],
        ),
        ("... --- 😀\n!!!", []),
        ("", []),
    ],
)
def test_sentences_are_found(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected and has_several(text) == (len(expected) > 1)


@pytest.mark.parametrize("line", ["-", "_", "\u2013 ", ". ", "\r"])
def test_lines_without_text_are_one_piece_however_many(line: str) -> None:
    rest = f"\n{line}" * 100_000
    pieces = [piece for piece in split_text(f"{rest}\nOne.{rest}\nTwo{rest}") if piece[0]]
    assert [piece for piece, is_translated in pieces if is_translated] == ["One.", "Two"] and len(pieces) == 5


@pytest.mark.parametrize("stop", ["。 ", "Mr. "])
def test_others_have_their_turn_at_stops_that_end_no_sentence(stop: str) -> None:
    assert list(split_text(stop * 1000)).count(("", False)) >= 999


@given(st.text(alphabet=st.sampled_from("aB1.!? \n\r\t\"'()-。😀é\x00"), max_size=60), st.booleans())
def test_only_segments_change(text: str, is_by_line: bool) -> None:
    pieces = list(split_text(text, is_by_line=is_by_line))
    assert "".join(piece for piece, _ in pieces) == text
    assert all(piece == piece.strip() != "" for piece, is_translated in pieces if is_translated)
    assert not is_by_line or sum(is_translated for _, is_translated in pieces) <= len(text.splitlines())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- One. Two.\n  * three\n\n## Four\n> five", ["One.", "Two.", "three", "Four", "five"]),
        ("1. Open. Look.\n2. Go.\n\n(3) a) Stop.", ["Open.", "Look.", "Go.", "Stop."]),
        ("3. Mai 1990 war es.\n17. Juni.", ["3. Mai 1990 war es.", "17. Juni."]),
        ("A dog runs. 😀\nWell done!👍🏽 ❤️\n90 °\nI ❤️ it. »", ["A dog runs.", "Well done!", "90 °", "I ❤️ it. »"]),
        ("-5 degrees\n*bold* text\n#tag", ["-5 degrees", "*bold* text", "#tag"]),
    ],
)
def test_list_marks_are_no_part_of_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_lines_are_divided_from_each_other_only() -> None:
    pieces = split_text(" One. Two.\r\n\n- Three?\n", is_by_line=True)
    assert [piece for piece in pieces if piece[0]] == [
        (" ", False), ("One. Two.", True), ("\r\n\n- ", False), ("Three?", True), ("\n", False)
    ]  # fmt: skip


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("one two, three four five; six seven eight", 7, ["one two, three four five;", " six seven eight"]),
        ("one, two three four five six", 4, ["one, two three ", "four five six"]),
        ("一二三，四五六", 4, ["一二三，", "四五六"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
    ],
)
def test_a_sentence_is_cut_at_clauses_then_at_words(text: str, most: int, expected: list[str]) -> None:
    num_tokens = words if " " in text else len
    assert list(cut_text(text, num_tokens, most, 100)) == expected


def test_a_sentence_is_cut_in_linear_time() -> None:
    num_counted = 0

    def num_tokens(text: str) -> int:
        nonlocal num_counted
        num_counted += len(text)
        return 4 * len(text)

    assert "".join(cut_text("😀" * 100_000, num_tokens, 512, 12_000)) == "😀" * 100_000
    assert num_counted < 4 * 100_000


@given(st.text(alphabet="ab ,;，\n", max_size=80), st.integers(1, 9), st.integers(1, 30))
def test_parts_of_a_cut_sentence_fit(text: str, most: int, max_characters: int) -> None:
    parts = list(cut_text(text, len, most, max_characters))
    assert "".join(parts) == text and all(0 < len(part) <= min(most, max_characters) for part in parts)


@pytest.mark.parametrize(
    "text", ["." * 10**6, ". " * 10**5, "a." * 10**5, '."' * 10**5, ("." + " " * 1000) * 300, ("." + "-" * 1000) * 300]
)
def test_a_text_is_divided_in_linear_time(text: str) -> None:
    began = time.process_time()
    assert "".join(piece for piece, _ in split_text(text)) == text
    assert time.process_time() - began < 20, "the square would be minutes"


async def test_callers_take_turns_however_many_texts_each_has() -> None:
    slices, done = Slices(), list[str]()

    def slow(owner: str) -> Iterator[None]:
        for _ in range(2):
            time.sleep(SLICE_SECONDS)
            done.append(owner)
            yield None

    await asyncio.gather(*(slices.collect(slow(owner), owner) for owner in ("many",) * 20 + ("one",)))
    assert [i for i, owner in enumerate(done) if owner == "one"][-1] < 6 and len(done) == 42


async def test_others_work_between_any_two_slices() -> None:
    done = list[str]()
    slices = Slices()

    def slow(name: str) -> Iterator[None]:
        for _ in range(3):
            time.sleep(SLICE_SECONDS)
            done.append(name)
            yield None

    async def other() -> None:
        while len(done) < 100:
            done.append("other")
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.gather(*(slices.collect(slow(name), name) for name in "abc"))
    task.cancel()
    assert done.index("b") < [i for i, name in enumerate(done) if name == "a"][1], "in turns"
    assert all("other" in pair for pair in pairwise(done)), done
