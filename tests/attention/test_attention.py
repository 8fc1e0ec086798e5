"""Attention maps: which are chosen and fit; the page, read as a browser does; and the picture."""

import base64
import hashlib
import random
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from dragoman.attention.maps import MAX_CHARACTERS, PAGE_ROOM, PICTURE_ROOM, Kind, Look, Map, Part, Room, line, token
from dragoman.attention.page import ALPHABET, LEVELS, page, shade, written
from dragoman.model.errors import InputError

SOURCE = ("␣a", "<script>alert(1)</script>", "雪\"&'", "⟨eos⟩")
READ = ("⟨start⟩", "$x$", "<0xE2>")
SAID = ("$x$", "<0xE2>", "⟨eos⟩")
VOID = {"meta", "input", "path", "rect", "use"}


def weights(rows: int, columns: int, is_causal: bool, rng: random.Random) -> list[list[float]]:
    """Draw rows that sum to 1."""
    drawn = [[rng.random() ** 4 * (not is_causal or column <= row) for column in range(columns)] for row in range(rows)]
    return [[value / sum(row) for value in row] for row in drawn]


def part(kind: Kind, rows: tuple[str, ...], columns: tuple[str, ...], num_layers: int, num_heads: int, seed: int = 0) -> Part:
    rng, is_causal, places = random.Random(seed), kind is Kind.DECODER, product(range(num_layers), range(num_heads))
    maps = (Map(weights(len(rows), len(columns), is_causal, rng), layer, head) for layer, head in places)
    return Part(kind, rows, columns, tuple(maps))


def look() -> Look:
    """Two layers with three heads of each kind, but one encoder layer more, of tokens that are hard to draw."""
    decoder, cross = part(Kind.DECODER, READ, READ, 2, 3, 1), part(Kind.CROSS, SAID, SOURCE, 2, 3, 2)
    parts = (part(Kind.ENCODER, SOURCE, SOURCE, 3, 3), decoder, cross)
    return Look("en-<de>", "a <script>alert(1)</script>", "x\u202e", parts, ("A <note>.",))


MAPS = [drawn for part in look().parts for drawn in part.maps]


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
        (b"\x00", "<U+0000>"),
        ("\u00a0\u200b\u202e".encode(), "<U+00A0><U+200B><U+202E>"),
        ("\u0301".encode(), "◌\u0301"),
        (b"", "⟨eos⟩"),
        (b"a" * MAX_CHARACTERS, "a" * MAX_CHARACTERS),
        (b"a" * (MAX_CHARACTERS + 1), "a" * (MAX_CHARACTERS - 1) + "…"),
    ],
)
def test_everything_in_a_token_can_be_seen(piece: bytes, written: str) -> None:
    assert token(piece, "eos") == written
    assert line("a dog\nruns \u202e") == "a dog\\nruns <U+202E>"


class Page(HTMLParser):
    """Elements with their attributes and the text right in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_endtag(self, tag) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data) -> None:
        if self.open:
            self.texts[self.open[-1]] += data

    def text(self, tag: str) -> list[str]:
        return [text for (name, _), text in zip(self.elements, self.texts, strict=True) if name == tag]

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return page(look())


@pytest.fixture(scope="module")
def read(text: str) -> Page:
    return Page(text)


def test_every_map_has_a_title_and_its_tokens_on_both_axes(read: Page) -> None:
    assert read.open == []
    names = {"Encoder self-attention": 3, "Decoder self-attention": 2, "Cross-attention": 2}
    expected = [f"{name}, layer {n}, head {head}" for name, layers in names.items() for n in range(layers) for head in range(3)]
    assert read.text("title")[1:] == expected
    maps = [attributes for attributes in read.attributes("svg") if attributes.get("class") == "map"]
    assert len(maps) == len(expected) and all(attributes["role"] == "img" for attributes in maps)
    for tokens in (SOURCE, SAID):
        assert " ".join(tokens) in " ".join(read.text("text"))
    axes = [f"{kind}-{axis}" for kind, n in zip(Kind, (9, 6, 6), strict=True) for _ in range(n) for axis in ("rows", "columns")]
    assert {attributes["id"] for attributes in read.attributes("g") if "id" in attributes} == set(axes)
    assert [attributes["href"] for attributes in read.attributes("use")] == [f"#{axis}" for axis in axes]


def test_the_page_loads_nothing_and_its_policy_allows_its_own_style_and_script_alone(text: str, read: Page) -> None:
    assert set(re.findall(r"\w+://[^\s\"'<>]*", text)) == {"http://www.w3.org/2000/svg"}
    for _, attributes in read.elements:
        assert "src" not in attributes and "style" not in attributes and not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in read.elements}
    assert "url(" not in text and "@import" not in text
    (policy,) = (meta["content"] for meta in read.attributes("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    allowed = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    for tag in ("style", "script"):
        (content,) = read.text(tag)
        assert allowed[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_tokens_and_texts_are_text(text: str, read: Page) -> None:
    assert "<script>alert" not in text and len(read.attributes("script")) == 1
    assert "<script>alert(1)</script>" in read.text("text") and "雪\"&'" in read.text("text")
    assert read.text("bdi") == ["a <script>alert(1)</script>", "x<U+202E>"]
    assert "A <note>." in read.text("p") and read.text("h1") == ["Attention of en-<de>"]
    first = zip(SOURCE, MAPS[0].weights, strict=True)
    assert read.text("desc")[0] == "; ".join(f"{name} → {SOURCE[row.index(max(row))]} {max(row):.2f}" for name, row in first)


def unwritten(packed: str) -> list[float]:
    numbers = [ALPHABET.index(character) for character in packed]
    return [(high * 64 + low) / 4095 for high, low in zip(numbers[::2], numbers[1::2], strict=True)]


def cells(markup: str) -> dict[tuple[int, int], int]:
    """Draw a map's paths: the shade of each cell that has one."""
    shades: dict[tuple[int, int], int] = {}
    for level, path in re.findall(r'<path class="l(\d+)" d="M0 \.5([^"]*)"/>', markup):
        x = y = 0
        for right, down, length in re.findall(r"m(-?\d+) (-?\d+)h(\d+)", path):
            x, y = x + int(right), y + int(down)
            for _ in range(int(length)):
                assert shades.setdefault((y, x), int(level)) == int(level)
                x += 1
    return shades


def test_every_weight_can_be_read_back_and_its_cell_has_its_shade(text: str, read: Page) -> None:
    data = [attributes["data-weights"].split(".") for attributes in read.attributes("svg") if "data-weights" in attributes]
    maps = re.findall(r'<svg class="map".*?</svg>', text, re.DOTALL)
    for lines, markup, expected in zip(data, maps, MAPS, strict=True):
        for packed, row in zip(lines, expected.weights, strict=True):
            values = unwritten(packed)
            assert [*values, *[0.0] * (len(row) - len(values))] == pytest.approx(row, abs=0.5001 / 4095)
        wanted = {(y, x): round(LEVELS * w**0.5) for y, row in enumerate(expected.weights) for x, w in enumerate(row)}
        assert cells(markup) == {place: level for place, level in wanted.items() if level}
    assert [shade(weight) for weight in (0.0, 1.0, 1.0000001, -1e-9)] == [0, LEVELS, LEVELS, 0]
    assert written([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0000001, 0.0, 0.5]]) == "AA//..//AAgA"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    figure = pytest.importorskip("matplotlib.figure").Figure
    from dragoman.attention import picture

    made, original = [], figure.__init__

    def keep(self: Any, *arguments: object, **options: object) -> None:
        original(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(figure, "__init__", keep)
    return lambda path, look: (picture.draw(path, look), made[-1])[1]


def test_every_head_has_a_panel_with_its_weights_and_tokens(draw: Callable[..., Any], tmp_path: Path) -> None:
    figure = draw(tmp_path / "a.png.tmp", look())
    *panels, _scale = figure.axes
    assert len(panels) == len(MAPS) == 21
    assert not any(one.get_position().overlaps(other.get_position()) for one, other in combinations(panels, 2))
    for panel, expected in zip(panels, MAPS, strict=True):
        assert panel.images[0].get_array().tolist() == [pytest.approx(row) for row in expected.weights]
    headings = [text.get_text() for text in figure.texts]
    assert "Encoder self-attention, layer 2" in headings and headings.count("head 2") == 7
    for first, rows, columns in ((0, SOURCE, SOURCE), (9, READ, READ), (15, SAID, SOURCE)):
        assert tuple(label.get_text() for label in panels[first].get_yticklabels()) == rows
        for panel in panels[first : first + 3]:
            assert tuple(label.get_text() for label in panel.get_xticklabels()) == columns
    with pytest.importorskip("PIL.Image").open(tmp_path / "a.png.tmp") as image:
        assert image.format == "PNG" and image.width > 300 and image.height > 800
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
