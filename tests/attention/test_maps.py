import pytest

from dragoman.attention.maps import PAGE_ROOM, PICTURE_ROOM, Kind, Look, Room
from dragoman.model.errors import InputError
from tests.attention.looks import look, part


def shown(chosen: Look) -> dict[str, list[int | None]]:
    return {part.kind: [maps[0].layer for maps in part.layers()] for part in chosen.parts}


def test_kinds_and_a_layer_can_be_chosen() -> None:
    assert shown(look().only()) == {"encoder": [0, 1, 2], "decoder": [0, 1], "cross": [0, 1]}
    assert shown(look().only([Kind.CROSS], 1)) == {"cross": [1]}
    assert shown(look().only(layer=2)) == {"encoder": [2]}
    assert look().only([Kind.CROSS], 1).num_maps == 3


def test_what_a_model_does_not_have_is_named() -> None:
    with pytest.raises(InputError, match="--layer 2: model en-<de> has the layers 0 to 1"):
        look().only([Kind.CROSS], 2)
    recurrent = look().only([Kind.CROSS])
    with pytest.raises(InputError, match="--kind encoder: model en-<de> has no encoder self-attention, only cross"):
        recurrent.only([Kind.ENCODER])


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InputError, match="21 heads; a sheet shows 20 at most: --kind and --layer choose less"):
        Room("a sheet", 9, 20, 1000).check(look())
    num_weights = 9 * 16 + 6 * 9 + 6 * 12
    Room("a sheet", 9, 21, num_weights).check(look())
    with pytest.raises(InputError, match=f"{num_weights} weights; a sheet shows {num_weights - 1} at most"):
        Room("a sheet", 9, 21, num_weights - 1).check(look())


@pytest.mark.parametrize(("room", "limit"), [(PAGE_ROOM, 256), (PICTURE_ROOM, 64)])
def test_an_axis_that_is_too_long_is_named(room: Room, limit: int) -> None:
    room.check_tokens("source", limit)
    with pytest.raises(InputError, match=f"source: {limit + 1} tokens; a .* shows {limit} at most"):
        room.check_tokens("source", limit + 1)


def test_a_usual_model_fits() -> None:
    tokens = tuple("abcdefgh" * 5)
    whole = Look("m", "", "", tuple(part(kind, tokens, tokens, 6, 8) for kind in Kind))
    PAGE_ROOM.check(whole)
    PICTURE_ROOM.check(whole)
