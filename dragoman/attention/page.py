"""A page of attention that needs nothing else, as text: every map is an SVG, drawn without the script, which tells single weights.

The page asks for nothing from anywhere, and its own policy would refuse it: style and script are named there by their hashes. Maps
of one kind share the texts of their axes. In a map the cells of one shade are one path, and weights are two characters each, so
that a page of a hundred heads stays small.
"""

import base64
import hashlib
import html
import math
import unicodedata
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Final

from dragoman.attention.maps import MEANINGS, NAMES, Kind, Look, Map, Part, line

LEVELS: Final = 16
"""Shades of a weight; a cell's is that of its weight's square root, so that small ones can be told apart too."""
CELL: Final = 12
"""Side of a cell in a map's own units, as in `page.js`."""
ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_CHARACTER: Final = 6.1  # width in a map's units
_SHADES: Final = (0.01, 0.05, 0.25, 0.5, 1.0)


def page(look: Look) -> str:
    """Return the page."""
    style, script = (f"\n{resources.files(__package__).joinpath(name).read_text('utf-8')}" for name in ("page.css", "page.js"))
    style += "".join(f".l{level}{{stroke-opacity:{level / LEVELS:.4g}}}" for level in range(1, LEVELS)) + "\n"
    script = script.replace("{ALPHABET}", ALPHABET).replace("{CELL}", str(CELL))
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"Attention of {look.model}"
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title><style>{style}</style></head><body><main>",
            _header(title, look),
            *(_section(part) for part in look.parts),
            f'</main><output aria-live="polite"></output><script>{script}</script></body></html>\n',
        )
    )


def shade(weight: float) -> int:
    """Return a weight's shade, of `LEVELS`; 0 is not drawn."""
    return min(round(math.sqrt(max(weight, 0.0)) * LEVELS), LEVELS)


def written(weights: Iterable[Sequence[float]]) -> str:
    """Return weights in two characters each, to a 4095th; a row's last zeros are left out, and rows have a full stop between."""
    lines = []
    for row in weights:
        numbers = [min(max(round(weight * 4095), 0), 4095) for weight in row]
        while numbers and not numbers[-1]:
            numbers.pop()
        lines.append("".join(ALPHABET[number >> 6] + ALPHABET[number & 63] for number in numbers))
    return ".".join(lines)


def _header(title: str, look: Look) -> str:
    links = "".join(f'<li><a href="#{part.kind}">{NAMES[part.kind]}</a></li>' for part in look.parts)
    sizes = "".join(
        f'<label><input type="radio" name="size" id="{size}"{" checked" if size == "medium" else ""}> {size}</label>'
        for size in ("small", "medium", "large")
    )
    shades = "".join(
        f'<span><svg viewBox="0 0 1 1" aria-hidden="true"><g class="cells"><path class="l{shade(weight)}" d="M0 .5h1"/></g></svg>'
        f"{weight:g}</span>"
        for weight in _SHADES
    )
    notes = "".join(f"<p>{_text(note)}</p>" for note in look.notes)
    return (
        f"<header><h1>{_text(title)}</h1><dl><dt>source</dt><dd><bdi>{_text(line(look.source))}</bdi></dd>"
        f"<dt>target</dt><dd><bdi>{_text(line(look.target))}</bdi></dd></dl>{notes}"
        f'<nav aria-label="Kinds of attention"><ul>{links}</ul></nav>'
        f'<div class="bar"><fieldset><legend>Size of maps</legend>{sizes}</fieldset>'
        f'<div class="scale">Weight {shades}</div></div></header>'
    )


def _section(part: Part) -> str:
    left, top = (_width(tokens) for tokens in (part.rows, part.columns))
    layers = "".join(
        f'<section aria-label="{NAMES[part.kind]}, {maps[0].layer_name}"><h3>{maps[0].layer_name.capitalize()}</h3>'
        f'<div class="maps">{"".join(_figure(part, drawn, left, top) for drawn in maps)}</div></section>'
        for maps in part.layers()
    )
    return (
        f'<section id="{part.kind}"><h2>{NAMES[part.kind]}</h2><p>{MEANINGS[part.kind]}</p>'
        f"{_axes(part.kind, part.rows, part.columns, left, top)}{layers}</section>"
    )


def _axes(kind: Kind, rows: Sequence[str], columns: Sequence[str], left: int, top: int) -> str:
    """Return the texts that all maps of a kind have on their axes."""
    beside = "".join(f'<text x="{left - 4}" y="{top + CELL * place + 9}">{_text(token)}</text>' for place, token in enumerate(rows))
    above = "".join(
        f'<text transform="translate({left + CELL * place + 9} {top - 4})rotate(-90)">{_text(token)}</text>'
        for place, token in enumerate(columns)
    )
    return (
        f'<svg class="tokens" width="0" height="0" aria-hidden="true"><defs><g class="rows" id="{kind}-rows">{beside}</g>'
        f'<g id="{kind}-columns">{above}</g></defs></svg>'
    )


def _figure(part: Part, drawn: Map, left: int, top: int) -> str:
    """Return one map; its description tells where each row looks most, in words."""
    width, height = CELL * len(part.columns), CELL * len(part.rows)
    paths = "".join(f'<path class="l{level}" d="{path}"/>' for level, path in enumerate(_paths(drawn.weights)) if path)
    most = (max(range(len(row)), key=row.__getitem__) for row in drawn.weights)
    said = "; ".join(
        f"{row} → {part.columns[place]} {weights[place]:.2f}"
        for row, weights, place in zip(part.rows, drawn.weights, most, strict=True)
    )
    return (
        f'<figure><svg class="map" role="img" viewBox="0 0 {left + width + 2} {top + height + 2}" data-kind="{part.kind}" '
        f'data-left="{left}" data-top="{top}" data-weights="{written(drawn.weights)}">'
        f"<title>{NAMES[part.kind]}, {drawn.layer_name}, {drawn.head_name}</title><desc>{_text(said)}</desc>"
        f'<use href="#{part.kind}-rows"/><use href="#{part.kind}-columns"/>'
        f'<g class="cells" transform="translate({left} {top})scale({CELL})">{paths}</g>'
        f'<rect class="frame" x="{left}" y="{top}" width="{width}" height="{height}"/></svg>'
        f"<figcaption>{drawn.head_name.capitalize()}</figcaption></figure>"
    )


def _paths(weights: Sequence[Sequence[float]]) -> list[str]:
    """Return for each shade the strokes, one high and as long as there are neighbours of it, as a path; the pen starts at 0, ½."""
    paths = ["M0 .5"] + ["M0 .5"] * LEVELS
    pens = [(0, 0)] * (LEVELS + 1)
    for y, row in enumerate(weights):
        shades = [*map(shade, row), -1]
        start = 0
        for x in range(1, len(shades)):
            level = shades[start]
            if shades[x] != level:
                if level:
                    at = pens[level]
                    paths[level] += f"m{start - at[0]} {y - at[1]}h{x - start}"
                    pens[level] = (x, y)
                start = x
    return [path if pen != (0, 0) else "" for path, pen in zip(paths, pens, strict=True)]


def _width(tokens: Iterable[str]) -> int:
    """Return how much room the texts beside a map take, in its own units; some characters are as wide as two."""
    widths = (sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in token) for token in tokens)
    return math.ceil(max(widths, default=0) * _CHARACTER) + 8


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _text(text: str) -> str:
    return html.escape(text, quote=True)
