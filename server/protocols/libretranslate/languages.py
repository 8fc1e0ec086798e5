"""Languages of LibreTranslate's API: codes and English names of the models' languages, and language detection."""

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from dragoman.model.generation import Language
from dragoman.server.errors import InvalidRequest, NotOffered
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.service.generate import is_of_one_pair
from dragoman.server.service.languages import PromptTemplates, shown
from dragoman.server.service.sentences import on_thread

# Source language that is to be detected.
AUTO = "auto"
# LibreTranslate's former codes.
ALIASES = {"zt": "zh-Hant", "pb": "pt-BR"}
# Characters used for detection; more do not improve it.
MAX_CHARACTERS = 4096
MAX_CANDIDATES = 3

# Patterns of codes, most preferred first.
_CODES = (
    re.compile(r"[a-z]{2}"),
    re.compile(r"[a-z]{2}_[a-z]{4}"),
    re.compile(r"[a-z]{2}_(?:[a-z]{2}|[0-9]{3})"),
    re.compile(r"[a-z]{3}"),
)
_NAME = re.compile(r"[^\W\d_]{4,}(?:_[^\W\d_]+)*")


class Known(NamedTuple):
    """An entry of `/languages`."""

    code: str
    name: str
    targets: Sequence[str]


class Detected(NamedTuple):
    """A detected language; `confidence` is 0 to 100."""

    language: str
    confidence: float


class _Codes(NamedTuple):
    """A model's language names by code."""

    source: dict[str, str]
    target: dict[str, str]


class LibreLanguages:
    """Languages of several models, cached per model, and their detection."""

    def __init__(self) -> None:
        self._codes: WeakKeyDictionary[PromptTemplates, _Codes] = WeakKeyDictionary()
        self.detector = Detector()

    def all(self, models: Iterable[LoadedModel]) -> list[Known]:
        """Return all languages, sorted by code, with their targets' codes."""
        names: dict[str, str] = {}
        targets: dict[str, set[str]] = {}
        for model in models:
            source, target = self._of(model.templates)
            if not source:  # requests must name a source language
                continue
            names = target | source | names
            for code in source:
                targets.setdefault(code, set()).update(target.keys() - {code})
        return [Known(code, names[code], sorted(targets.get(code, ()))) for code in sorted(names)]

    def sources_of(self, models: Sequence[LoadedModel], target: str) -> list[str]:
        """Return the codes of the source languages for a target in any spelling."""
        able = (model for model in models if model.templates.writes(target) is not None)
        return sorted({code for model in able for code in self._of(model.templates).source} - {self.find(models, target)})

    def find(self, models: Iterable[LoadedModel], spelling: str) -> str:
        """Return the code of a language in any spelling; empty if no model has it."""
        for model in models:
            language = model.templates.reads(spelling) or model.templates.writes(spelling)
            if language is not None:
                return code_of(language)
        return ""

    async def source_of(
        self, models: Sequence[LoadedModel], texts: Sequence[str], source: str, target: str
    ) -> tuple[str, Detected | None]:
        """Return the source language, and its detection if `source` is `auto`.

        Raises:
            InvalidRequest: If no model has one of the languages, or none translates to the target.
            NotOffered: If several source languages are possible, and the extra `detect` is not installed.
        """
        for field, code in (("target_language", target), ("source_language", source)):
            if code.lower() != AUTO and not self.find(models, code):
                there = ", ".join(known.code for known in self.all(models)) or "none"
                raise InvalidRequest(field, f"{shown(code)} is not supported; there: {there}"[:500])
        if source.lower() != AUTO:
            return source, None
        sources = self.sources_of(models, target)
        if not sources:
            raise InvalidRequest("target_language", f"{shown(target)} is not supported: nothing is translated to it")
        if not self.detector.is_installed and len(sources) == 1:
            return sources[0], Detected(sources[0], 0.0)
        found = await self.detector.detect(texts, [*sources, self.find(models, target)])
        return found[0].language, found[0]

    def is_same(self, models: Sequence[LoadedModel], source: str, target: str) -> bool:
        """Return whether source and target are one language that no model is dedicated to."""
        is_one = self.find(models, source) == self.find(models, target)
        return is_one and not any(is_of_one_pair(model) and model.templates.is_able(source, target) for model in models)

    def _of(self, templates: PromptTemplates) -> _Codes:
        codes = self._codes.get(templates)
        if codes is None:
            sides = (templates.source_languages, templates.target_languages)
            codes = self._codes[templates] = _Codes(*({code_of(x): name_of(x) for x in side} for side in sides))
        return codes


def code_of(language: Language) -> str:
    """Return the preferred code of a language (`de` for `deu_Latn`, `zh-Hant` for `zho_Hant`), else the model's own."""
    code = language.code.replace("-", "_").lower()
    for pattern in _CODES:
        for name in (code, *language.names):
            if pattern.fullmatch(name):
                return _bcp47(name)
    return _bcp47(code)


def name_of(language: Language) -> str:
    """Return the English name of a language, or its code."""
    names = (language.label.replace(" ", "_"), *language.names)
    found = next((name for name in names if _NAME.fullmatch(name) and name != language.code.lower()), "")
    return found.replace("_", " ").title() or code_of(language)


def _bcp47(name: str) -> str:
    first, *rest = name.split("_")
    return "-".join([first, *(part.title() if len(part) == 4 else part.upper() for part in rest)])


class Detector:
    """Language detection by py3langid, loaded at the first request; optional extra `detect`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._identifier: Any = None
        self.is_installed = find_spec("py3langid") is not None

    async def detect(self, texts: Sequence[str], codes: Sequence[str]) -> list[Detected]:
        """Return the likeliest of `codes` for all texts together, best first; raise `NotOffered` without py3langid."""
        if not self.is_installed:
            raise NotOffered("source: languages are not detected here; the server's extra `detect` is not installed")
        return await on_thread(self._detect, "\n".join(texts)[:MAX_CHARACTERS], codes)

    def _detect(self, text: str, codes: Sequence[str]) -> list[Detected]:
        known: dict[str, str] = {}
        for code in codes:
            known.setdefault(code.partition("-")[0], code)
        ranked: list[tuple[str, float]] = []
        if any(map(str.isalpha, text)):
            with self._lock:
                if self._identifier is None:
                    from py3langid.langid import MODEL_FILE, LanguageIdentifier

                    self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
                ranked = [(language, share) for language, share in self._identifier.rank(text) if language in known]
        total = sum(share for _, share in ranked)
        if not total > 0:  # none detected: a default without confidence
            return [Detected("en" if "en" in codes else codes[0], 0.0)] if codes else []
        return [Detected(known[language], round(100 * share / total, 1)) for language, share in ranked[:MAX_CANDIDATES]]
