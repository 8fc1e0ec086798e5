"""The models of a server, printed for people or for programs."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dragoman.client.results import ModelInfo

_WIDE = 1000


def models_table(models: Sequence[ModelInfo]) -> Table:
    """Lay the models out, one a row."""
    table = Table()
    for heading in ("model", "version", "ready", "precision", "device"):
        table.add_column(heading)
    for heading in ("max source", "max target", "default new", "slots"):
        table.add_column(heading, justify="right")
    for model in models:
        state = Text("yes", style="green") if model.is_ready else Text("no", style="red")
        limits = (model.max_source_tokens, model.max_target_tokens, model.default_max_new_tokens, model.max_slots)
        words = (model.name, model.version, state, model.precision, model.device)
        table.add_row(*(word if isinstance(word, Text) else _plain(word) for word in words), *map(str, limits))
    return table


def _plain(text: str) -> Text:
    """Return a server's word as text that cannot steer the terminal."""
    return Text("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))


def print_models(models: Sequence[ModelInfo], out: TextIO, is_json: bool = False) -> None:
    """Write the models as a table, below it the domains they know, or as one JSON object a line with every field of `ModelInfo`."""
    if is_json:
        for model in models:
            out.write(json.dumps(dataclasses.asdict(model), ensure_ascii=False) + "\n")
        out.flush()
    else:
        # A file has no width: nothing is cut to a terminal's there.
        console = Console(file=out, width=None if out.isatty() else _WIDE)
        console.print(models_table(models))
        for model in models:
            if model.domain:
                console.print(_plain(f"Domain of {model.name}: {model.domain}"))
