"""The models of a server, printed for people or for programs."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dragoman.client.model_info import Language, ModelInfo, ModelVersion

# Of what is no terminal.
WIDE = 1000
# A model may have hundreds of languages; a table has room for a few.
_MAX_LANGUAGES = 3


def models_table(models: Sequence[ModelInfo]) -> Table:
    """Lay the models out, one a row; what kind they are has a column where one is no Transformer, languages where one has any."""
    table = Table()
    has_kinds = any(model.architecture not in ("", "transformer") for model in models)
    for heading in ("model", "version", "ready", *(["architecture"] if has_kinds else []), "precision", "device"):
        table.add_column(heading)
    for heading in ("max source", "max target", "default new", "slots"):
        table.add_column(heading, justify="right")
    has_languages = any(model.source_languages or model.target_languages for model in models)
    if has_languages:
        table.add_column("languages")
    for model in models:
        state = Text("yes", style="green") if model.is_ready else Text("no", style="red")
        limits = (model.max_source_tokens, model.max_target_tokens, model.default_max_new_tokens, model.max_slots)
        kind = [model.architecture] if has_kinds else []
        words: list[str | Text] = [model.name, model.version, state, *kind, model.precision, model.device]
        cells = [word if isinstance(word, Text) else plain(word) for word in words]
        languages = [plain(_languages(model))] if has_languages else []
        table.add_row(*cells, *map(str, limits), *languages)
    return table


def _languages(model: ModelInfo) -> str:
    """Tell what a model reads and writes: `en → de, fr`, or `202: ace_Arab, ace_Latn, acm_Arab, …` where both are the same."""
    if model.source_languages == model.target_languages:
        return _some(model.source_languages)
    return f"{_some(model.source_languages) or 'any'} → {_some(model.target_languages) or 'any'}"


def _some(languages: Sequence[Language]) -> str:
    codes = [language.code for language in languages]
    if len(codes) <= _MAX_LANGUAGES:
        return ", ".join(codes)
    return f"{len(codes)}: {', '.join(codes[:_MAX_LANGUAGES])}, …"


def _defaults(model: ModelInfo) -> Iterator[str]:
    """Yield what holds where a request does not say, a field each, by the names of the API."""
    for name in ("source_language", "target_language"):
        if code := getattr(model, f"default_{name}"):
            yield f"{name} {code}"
    for field in dataclasses.fields(model.defaults):
        value = getattr(model.defaults, field.name)
        if field.name == "suppressed_tokens":
            if value:
                yield f"{len(value)} suppressed_tokens" if len(value) > 1 else f"suppressed_tokens [{value[0]}]"
        elif field.name == "is_end_forced":
            if value:
                yield "end-of-sequence is forced"
        elif value is not None:
            yield f"{field.name} {str(value).lower() if isinstance(value, bool) else format(value, 'g')}"


def _remarks(model: ModelInfo) -> Iterator[str]:
    """Yield what is said of a model below the table, a line each."""
    if model.domain:
        yield f"Domain of {model.name}: {model.domain}"
    if len(model.versions) > 1 or any(version.labels or version.name != version.version for version in model.versions):
        yield f"Versions of {model.name}: {'; '.join(map(_version, model.versions))}"
    if defaults := ", ".join(_defaults(model)):
        yield f"Defaults of {model.name}: {defaults}"
    if model.shortlist_tokens:
        yield f"Shortlist of {model.name}: answers are chosen from {model.shortlist_tokens} of {model.target_vocab_size} tokens"


def _version(version: ModelVersion) -> str:
    """Tell a version: `4 (0123456789ab, canary, 10%)`, or `3 (…, stable, 90%, default)`."""
    told = [
        *([version.version] if version.version != version.name else []),
        *version.labels,
        *([f"{100 * version.share:.3g}%"] if version.share else []),
        *(["default"] if version.is_default else []),
    ]
    return f"{version.name} ({', '.join(told)})" if told else version.name


def plain(text: str) -> Text:
    """Return a server's word as text that cannot steer the terminal."""
    return Text("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))


def print_models(models: Sequence[ModelInfo], out: TextIO, is_json: bool = False) -> None:
    """Write the models as a table, below it what else there is to tell, or as one JSON object a line with all of `ModelInfo`."""
    if is_json:
        for model in models:
            out.write(json.dumps(dataclasses.asdict(model), ensure_ascii=False) + "\n")
        out.flush()
    else:
        # A file has no width: nothing is cut to a terminal's there.
        console = Console(file=out, width=None if out.isatty() else WIDE)
        console.print(models_table(models))
        for model in models:
            for remark in _remarks(model):
                console.print(plain(remark))
