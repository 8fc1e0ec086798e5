"""Models of a server and the states of their versions, printed as a table or as JSON."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dragoman.client.model_info import Language, ModelInfo, ModelVersion
from dragoman.client.repository import ModelStatus, Requested, VersionStatus

# Width where the output is no terminal.
_WIDE = 1000
# A model may have hundreds of languages; a table has room for a few.
_MAX_LANGUAGES = 3
AnyModel = TypeVar("AnyModel", ModelInfo, ModelStatus)


def models_table(models: Sequence[ModelInfo]) -> Table:
    """Return a table with a row a model; architectures have a column where one is no Transformer, languages where one has any."""
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
    """Describe the languages of a model: `en → de, fr`, or `202: ace_Arab, ace_Latn, acm_Arab, …` where both are the same."""
    if model.source_languages == model.target_languages:
        return _some(model.source_languages)
    return f"{_some(model.source_languages) or 'any'} → {_some(model.target_languages) or 'any'}"


def _some(languages: Sequence[Language]) -> str:
    codes = [language.code for language in languages]
    if len(codes) <= _MAX_LANGUAGES:
        return ", ".join(codes)
    return f"{len(codes)}: {', '.join(codes[:_MAX_LANGUAGES])}, …"


def _defaults(model: ModelInfo) -> Iterator[str]:
    """Yield the defaults of a model, by the names of the API."""
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
    """Yield the remarks about a model below the table, a line each."""
    if model.domain:
        yield f"Domain of {model.name}: {model.domain}"
    if len(model.versions) > 1 or any(version.labels or version.name != version.version for version in model.versions):
        yield f"Versions of {model.name}: {'; '.join(map(_version, model.versions))}"
    if defaults := ", ".join(_defaults(model)):
        yield f"Defaults of {model.name}: {defaults}"
    if model.num_engines:
        alone = f", {model.num_lone_threads} for a lone request" if model.num_lone_threads > model.num_threads else ""
        yield f"Engines of {model.name}: {model.num_engines}, threads of each: {model.num_threads}{alone}"
    if model.shortlist_tokens:
        yield f"Shortlist of {model.name}: answers are chosen from {model.shortlist_tokens} of {model.target_vocab_size} tokens"


def _version(version: ModelVersion) -> str:
    """Describe a version: `4 (0123456789ab, canary, 10%)`, or `3 (…, stable, 90%, default)`."""
    told = [
        *([version.version] if version.version != version.name else []),
        *version.labels,
        *([f"{100 * version.share:.3g}%"] if version.share else []),
        *(["default"] if version.is_default else []),
    ]
    return f"{version.name} ({', '.join(told)})" if told else version.name


def plain(text: str) -> Text:
    """Return a server's text without control characters, which could steer the terminal."""
    return Text("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))


def print_models(models: Sequence[ModelInfo], out: TextIO, is_json: bool = False) -> None:
    """Write the models as a table with remarks below it, or as one JSON object a line with all of `ModelInfo`."""
    _print(models, out, is_json, lambda: models_table(models), _remarks)


def _print(
    models: Sequence[AnyModel], out: TextIO, is_json: bool, table: Callable[[], Table], remarks: Callable[[AnyModel], Iterator[str]]
) -> None:
    if is_json:
        for model in models:
            out.write(json.dumps(dataclasses.asdict(model), ensure_ascii=False) + "\n")
        out.flush()
        return
    # A file has no width: nothing is cut to a terminal's there.
    console = Console(file=out, width=None if out.isatty() else _WIDE)
    console.print(table())
    for model in models:
        for remark in remarks(model):
            console.print(plain(remark))


_STYLES = {"serving": "green", "trial": "yellow", "refused": "red"}


def print_repository(
    models: Sequence[ModelStatus], out: TextIO, is_json: bool = False, clock: Callable[[], float] = time.time
) -> None:
    """Write a row for each version with remarks below, or one JSON object a line with all of `ModelStatus`."""
    _print(models, out, is_json, lambda: _versions_table(models, clock), _status_remarks)


def _versions_table(models: Sequence[ModelStatus], clock: Callable[[], float]) -> Table:
    table = Table()
    for heading in ("model", "version", "content", "state", "since", "labels", "share", "answered", "failed"):
        table.add_column(heading, justify="right" if heading in ("share", "answered", "failed") else "left")
    for model in models:
        for version in model.versions:
            table.add_row(*_cells(model, version, clock()))
        if not model.versions:
            table.add_row(plain(model.name), "", "", "no version")
    return table


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


def _status_remarks(model: ModelStatus) -> Iterator[str]:
    for version in model.versions:
        if version.reason:
            yield f"{model.name} {version.name}: {version.cause}: {version.reason}"
    for problem in model.problems:
        yield f"{model.name}: {problem}"
    if model.glossaries:
        yield f"{model.name}: glossaries: {', '.join(model.glossaries)}"
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
