"""The languages that callers of LibreTranslate's API are told: codes of two letters where there are some, and names in English."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from dragoman.model.generation import Language
from dragoman.server.core.frames import Frames
from dragoman.server.core.ports import Model

# What LibreTranslate once called two of its languages, and callers still may.
ALIASES = {"zt": "zh-Hant", "pb": "pt-BR"}

# From the code that is liked best to the one that is liked least.
_CODES = (
    re.compile(r"[a-z]{2}"),
    re.compile(r"[a-z]{2}_[a-z]{4}"),
    re.compile(r"[a-z]{2}_(?:[a-z]{2}|[0-9]{3})"),
    re.compile(r"[a-z]{3}"),
)
_NAME = re.compile(r"[^\W\d_]{4,}(?:_[^\W\d_]+)*")


class Known(NamedTuple):
    """A language as callers are told of it."""

    code: str
    name: str
    targets: Sequence[str]


class _Side(NamedTuple):
    source: dict[str, str]
    target: dict[str, str]


class LibreLanguages:
    """Puts the languages of models together; remembers of each model what it is told as, for there may be hundreds."""

    def __init__(self) -> None:
        self._sides: WeakKeyDictionary[Frames, _Side] = WeakKeyDictionary()

    def all(self, models: Iterable[Model]) -> list[Known]:
        """Return every language that some model reads or writes, sorted by code, with those it is translated to."""
        names: dict[str, str] = {}
        targets: dict[str, set[str]] = {}
        for model in models:
            source, target = self._of(model.frames)
            if not source:  # a request has to say what it is in, and the model knows no such name
                continue
            names = target | source | names
            for code in source:
                targets.setdefault(code, set()).update(target.keys() - {code})
        return [Known(code, names[code], sorted(targets.get(code, ()))) for code in sorted(names)]

    def sources_of(self, models: Sequence[Model], target: str) -> list[str]:
        """Return the codes of what is translated to a language, which is named by any of its spellings."""
        able = (model for model in models if model.frames.writes(target) is not None)
        return sorted({code for model in able for code in self._of(model.frames).source} - {self.find(models, target)})

    def find(self, models: Iterable[Model], asked: str) -> str:
        """Return the code of a language by any of its spellings; empty where no model has it."""
        for model in models:
            language = model.frames.reads(asked) or model.frames.writes(asked)
            if language is not None:
                return code_of(language)
        return ""

    def _of(self, frames: Frames) -> _Side:
        sides = self._sides.get(frames)
        if sides is None:
            told = (frames.source_languages, frames.target_languages)
            sides = self._sides[frames] = _Side(*({code_of(x): name_of(x) for x in side} for side in told))
        return sides


def code_of(language: Language) -> str:
    """Return the code that a language is told by: `de` of `deu_Latn`, `zh-Hant` of `zho_Hant`; the model's own where none fits."""
    code = language.code.replace("-", "_").lower()
    for pattern in _CODES:
        for name in (code, *language.names):
            if pattern.fullmatch(name):
                return _written(name)
    return _written(code)


def name_of(language: Language) -> str:
    """Return what English calls a language; its code where nothing says."""
    names = (language.label.replace(" ", "_"), *language.names)
    found = next((name for name in names if _NAME.fullmatch(name) and name != language.code.lower()), "")
    return found.replace("_", " ").title() or code_of(language)


def _written(name: str) -> str:
    """Return a code as BCP 47 writes it: regions in capitals, scripts with one."""
    first, *rest = name.split("_")
    return "-".join([first, *(part.title() if len(part) == 4 else part.upper() for part in rest)])
