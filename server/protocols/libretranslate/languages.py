"""Language codes of LibreTranslate's API, and language detection."""

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from dragoman.model.generation import Language
from dragoman.server.errors import NotOffered
from dragoman.server.service.languages import Frames
from dragoman.server.service.ports import Model
from dragoman.server.service.sentences import on_thread

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


# Of all texts of a request; more tells nothing more.
MAX_CHARACTERS = 4096
# How many languages an answer names.
MAX_CANDIDATES = 3


class Detected(NamedTuple):
    """A language that a text may be in, and how sure that is: 0 to 100."""

    language: str
    confidence: float


class Detector:
    """Tells languages; what it needs is loaded when it is asked for the first time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._identifier: Any = None
        #: Whether there is one: the extra `detect` is installed.
        self.is_there = find_spec("py3langid") is not None

    async def detect(self, texts: Sequence[str], codes: Sequence[str]) -> list[Detected]:
        """Return in which of some languages texts are, that of all of them together, the likeliest first.

        Raises:
            NotOffered: If nothing is installed that could tell.
        """
        if not self.is_there:
            raise NotOffered("source: languages are not detected here; the server's extra `detect` is not installed")
        return await on_thread(self._detect, "\n".join(texts)[:MAX_CHARACTERS], codes)

    def _detect(self, text: str, codes: Sequence[str]) -> list[Detected]:
        told: dict[str, str] = {}
        for code in codes:
            told.setdefault(code.partition("-")[0], code)
        if not any(map(str.isalpha, text)):
            return _nothing(codes)
        with self._lock:
            if self._identifier is None:
                self._identifier = _load()
            ranked = [(language, share) for language, share in self._identifier.rank(text) if language in told]
        total = sum(share for _, share in ranked)
        if not total > 0:
            return _nothing(codes)
        return [Detected(told[language], round(100 * share / total, 1)) for language, share in ranked[:MAX_CANDIDATES]]


def _nothing(codes: Sequence[str]) -> list[Detected]:
    """Return what is said of a text that is in no language: one of them, with no confidence at all."""
    return [Detected("en" if "en" in codes else codes[0], 0.0)] if codes else []


def _load() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
