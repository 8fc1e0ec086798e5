"""Characters that tokens stand for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.service.alignment import token_spans


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        ([b"Two", b" m", b"en", b"."], "Two men.", ["Two", "m", "en", "."]),
        ([b" Two", b" m", b"en"], "Two \n men", ["Two", "m", "en"]),  # white space that a tokeniser changes
        ([b"Gr", "öß".encode()[:3], "öß".encode()[3:], b"e"], "Größe", ["Gr", "öß", "ß", "e"]),  # half a character
        ([b"the", b" fi", b"ne"], "the ﬁne", ["the", "ﬁn", "e"]),  # a ligature that is normalised
        ([b"a", b"\xe2\x81\x87", b" b"], "a☃ b", ["a", "☃", "b"]),  # a character that the vocabulary lacks
        ([b"", b"a", b" ", b"b"], "a b", ["", "a", "", "b"]),
        ([b"a b"], "ab", ["ab"]),
        ([b" "], "a", [""]),
        ([], "a", []),
        ([b"a"], " ", [""]),
    ],
)
def test_spans_are_the_characters_of_tokens(pieces: list[bytes], text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in token_spans(pieces, text)] == expected


@given(st.lists(st.text(max_size=6), max_size=12), st.text(max_size=40))
def test_spans_are_in_order_and_within_any_text(pieces: list[str], text: str) -> None:
    encoded = [piece.encode() for piece in pieces]
    spans = [span for span in token_spans(encoded, text) if span[0] < span[1]]
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(before[0] <= after[0] and before[1] <= after[1] for before, after in pairwise(spans))
    same = "".join(pieces)
    covered = {place for span in token_spans(encoded, same) for place in range(*span)}
    assert covered >= {place for place, character in enumerate(same) if not character.isspace()}
