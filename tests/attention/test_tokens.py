import pytest

from dragoman.attention.tokens import MAX_CHARACTERS, line, token


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b" dog", "␣dog"),
        (b"  ", "␣␣"),
        (b"a\tb\r\n", "a\\tb\\r\\n"),
        (b"\xe2\x82", "<0xE2><0x82>"),
        (b"\xff", "<0xFF>"),
        (b"\x00", "<U+0000>"),
        ("\u00a0\u200b\u202e".encode(), "<U+00A0><U+200B><U+202E>"),
        ("\u0301".encode(), "◌\u0301"),
        ("雪".encode(), "雪"),
        (b"<script>", "<script>"),
        (b"", "⟨eos⟩"),
    ],
)
def test_everything_in_a_token_can_be_seen(piece: bytes, shown: str) -> None:
    assert token(piece, "eos") == shown


def test_a_long_token_is_cut() -> None:
    assert token(b"a" * MAX_CHARACTERS, "") == "a" * MAX_CHARACTERS
    assert token(b"a" * (MAX_CHARACTERS + 1), "") == "a" * (MAX_CHARACTERS - 1) + "…"


def test_spaces_of_a_line_stay() -> None:
    assert line("a dog\nruns \u202e") == "a dog\\nruns <U+202E>"
