"""Attention maps: which are chosen, which fit on a page or in a picture, and how tokens are written."""

import pytest

from dragoman.attention.maps import PAGE_ROOM, PICTURE_ROOM, Kind, Look, Room
from dragoman.attention.tokens import MAX_CHARACTERS, line, token
from dragoman.model.errors import InputError
from tests.attention.examples import look, part


def shown(chosen: Look) -> dict[str, list[int | None]]:
    return {part.kind: [maps[0].layer for maps in part.layers()] for part in chosen.parts}


def test_kinds_and_a_layer_can_be_chosen() -> None:
    assert shown(look().only()) == {"encoder": [0, 1, 2], "decoder": [0, 1], "cross": [0, 1]}
    assert shown(look().only([Kind.CROSS], 1)) == {"cross": [1]}
    assert shown(look().only(layer=2)) == {"encoder": [2]}
    cross = look().only([Kind.CROSS])
    assert cross.num_maps == 6
    with pytest.raises(InputError, match="--layer 2: model en-<de> has the layers 0 to 1"):
        cross.only(layer=2)
    with pytest.raises(InputError, match="--kind encoder: model en-<de> has no encoder self-attention, only cross"):
        cross.only([Kind.ENCODER])


def test_maps_and_weights_beyond_the_limits_are_named() -> None:
    num_weights = 9 * 16 + 6 * 9 + 6 * 12
    Room("a sheet", 9, 21, num_weights).check(look())
    with pytest.raises(InputError, match="21 heads; a sheet shows 20 at most: --kind and --layer choose less"):
        Room("a sheet", 9, 20, 1000).check(look())
    with pytest.raises(InputError, match=f"{num_weights} weights; a sheet shows {num_weights - 1} at most"):
        Room("a sheet", 9, 21, num_weights - 1).check(look())


@pytest.mark.parametrize(("room", "limit"), [(PAGE_ROOM, 256), (PICTURE_ROOM, 64)])
def test_a_usual_model_fits_and_an_axis_that_is_too_long_is_named(room: Room, limit: int) -> None:
    tokens = tuple("abcdefgh" * 5)
    room.check(Look("m", "", "", tuple(part(kind, tokens, tokens, 6, 8) for kind in Kind)))
    room.check_tokens("source", limit)
    with pytest.raises(InputError, match=f"source: {limit + 1} tokens; a .* shows {limit} at most"):
        room.check_tokens("source", limit + 1)


@pytest.mark.parametrize(
    ("piece", "written"),
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
        (b"a" * MAX_CHARACTERS, "a" * MAX_CHARACTERS),
        (b"a" * (MAX_CHARACTERS + 1), "a" * (MAX_CHARACTERS - 1) + "…"),
    ],
)
def test_everything_in_a_token_can_be_seen(piece: bytes, written: str) -> None:
    assert token(piece, "eos") == written


def test_spaces_of_a_line_stay() -> None:
    assert line("a dog\nruns \u202e") == "a dog\\nruns <U+202E>"
