"""The models of a server and what has become of their versions, printed for operators or for programs."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dragoman.client.models_table import WIDE, plain
from dragoman.client.repository import ModelStatus, Requested, VersionStatus

_STYLES = {"serving": "green", "trial": "yellow", "refused": "red"}


def print_repository(
    models: Sequence[ModelStatus], out: TextIO, is_json: bool = False, clock: Callable[[], float] = time.time
) -> None:
    """Write a row for each version, below them what else there is to tell; or one JSON object a line with all of `ModelStatus`."""
    if is_json:
        for model in models:
            out.write(json.dumps(dataclasses.asdict(model), ensure_ascii=False) + "\n")
        out.flush()
        return
    console = Console(file=out, width=None if out.isatty() else WIDE)
    table = Table()
    for heading in ("model", "version", "content", "state", "since", "labels", "share", "answered", "failed"):
        table.add_column(heading, justify="right" if heading in ("share", "answered", "failed") else "left")
    for model in models:
        for version in model.versions:
            table.add_row(*_cells(model, version, clock()))
        if not model.versions:
            table.add_row(plain(model.name), "", "", "no version")
    console.print(table)
    for model in models:
        for remark in _remarks(model):
            console.print(plain(remark))


def _cells(model: ModelStatus, version: VersionStatus, now: float) -> Iterator[Text]:
    share = f"{100 * version.share:.3g}%" if version.share else ""
    name = version.name + (" (default)" if version.is_default else "")
    yield from (plain(model.name), plain(name), plain(version.version))
    yield Text(version.state, style=_STYLES.get(version.state, ""))
    yield Text(_ago(now - version.since) if version.since else "")
    yield plain(", ".join(version.labels))
    yield from (Text(share), Text(str(version.num_answered)), Text(str(version.num_failed)))


def _ago(seconds: float) -> str:
    """Return a time that has passed, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f}{unit} ago"
    return f"{max(0.0, seconds):.0f}s ago"


def _remarks(model: ModelStatus) -> Iterator[str]:
    for version in model.versions:
        if version.reason:
            yield f"{model.name} {version.name}: {version.cause}: {version.reason}"
    for problem in model.problems:
        yield f"{model.name}: {problem}"
    if model.requested:
        yield f"{model.name}: asked for by operators: {', '.join(_asked(model.requested))}"


def _asked(requested: Requested) -> Iterator[str]:
    if requested.is_unloaded:
        yield "unloaded"
    if requested.pinned:
        yield f"rolled back to {requested.pinned}"
    for word, versions in (("load", requested.loaded), ("unload", requested.unloaded)):
        yield from (f"{word} {version}" for version in versions)
    for label, version in sorted(requested.labels.items()):
        yield f"label {label} = {version or 'none'}"
