"""The page, read as a browser does: its maps, what it loads, and its size."""

import base64
import hashlib
import random
import re
from html.parser import HTMLParser

import pytest

from dragoman.attention.maps import Kind, Look, Map, Part
from dragoman.attention.page import page, shade, written
from dragoman.attention.page_style import ALPHABET, LEVELS
from tests.attention.examples import SAID, SOURCE, look, part, weights

VOID = {"meta", "input", "path", "rect", "use"}
MAPS = [drawn for part in look().parts for drawn in part.maps]


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


def unwritten(line: str) -> list[float]:
    numbers = [ALPHABET.index(character) for character in line]
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
        for line, row in zip(lines, expected.weights, strict=True):
            values = unwritten(line)
            assert [*values, *[0.0] * (len(row) - len(values))] == pytest.approx(row, abs=0.5001 / 4095)
        wanted = {(y, x): round(LEVELS * w**0.5) for y, row in enumerate(expected.weights) for x, w in enumerate(row)}
        assert cells(markup) == {place: level for place, level in wanted.items() if level}
    assert [shade(weight) for weight in (0.0, 1.0, 1.0000001, -1e-9)] == [0, LEVELS, LEVELS, 0]
    assert written([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0000001, 0.0, 0.5]]) == "AA//..//AAgA"


def test_a_single_weight_of_a_single_kind_is_a_page() -> None:
    markup = page(Look("m", "s", "t", (Part(Kind.CROSS, ("a",), ("b",), (Map([[1.0]], None, None),)),)))
    assert cells(markup[markup.index('<svg class="map"') :]) == {(0, 0): LEVELS}
    assert "Cross-attention, mean of all layers, mean of all heads" in markup
    alone = Page(page(Look("m", "s", "t", (part(Kind.DECODER, ("a", "b"), ("a", "b"), 1, 1),))))
    assert [section["id"] for section in alone.attributes("section") if "id" in section] == ["decoder"]


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_usual_model_is_a_small_page(is_flat: bool) -> None:
    """Six layers with eight heads of each kind and forty tokens; where no two neighbours are of one shade, too."""
    tokens = tuple(f"␣word{n}" for n in range(40))
    rng = random.Random(0)

    def table(is_causal: bool) -> list[list[float]]:
        return [[rng.random() / 10 for _ in range(40)] for _ in range(40)] if is_flat else weights(40, 40, is_causal, rng)

    maps = {kind: tuple(Map(table(kind is Kind.DECODER), n // 8, n % 8) for n in range(48)) for kind in Kind}
    whole = Look("m", "s", "t", tuple(Part(kind, tokens, tokens, maps[kind]) for kind in Kind))
    assert 200_000 < len(page(whole).encode()) < (2_500_000 if is_flat else 2_000_000)
