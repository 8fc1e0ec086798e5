"""In what language a text is: py3langid's answer among the languages that models have, as LibreTranslate tells it."""

from collections.abc import Sequence
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple

from dragoman.server.core.text_work import on_thread
from dragoman.server.errors import NotOffered

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
