"""When a server of several models is ready. How each model is by itself is not decided here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

ALL, ANY = "all", "any"


class Readable(Protocol):
    """What can be ready or not."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now."""
        ...


class Needed(Protocol):
    """What a model has of its own, as far as it matters here."""

    @property
    def is_ready_needed(self) -> bool | None:
        """Whether the server is ready only while it is; None for what the rule says."""
        ...


class Named(Protocol):
    """A model, as far as it matters here."""

    @property
    def traits(self) -> Needed:
        """What it has of its own."""
        ...

    @property
    def name(self) -> str:
        """As requests give it."""
        ...

    @property
    def engine(self) -> Readable:
        """What runs it."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyRule:
    """The setting `ready_when`.

    Attributes:
        word: `all` or `any`; empty where models are named.
        names: Those models.
    """

    word: str = ANY
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "ReadyRule":
        """Return what a setting says: a word, or names with commas between them.

        Raises:
            ValueError: If it says nothing.
        """
        names = frozenset(name for part in text.split(",") if (name := part.strip()))
        if names in ({ALL}, {ANY}):
            return cls("".join(names))
        if not names or names & {ALL, ANY}:
            raise ValueError(f"{text!r} is not {ALL}, {ANY}, or names of models with commas between them")
        return cls("", names)

    def needs(self, name: str, is_ready_needed: bool | None = None) -> bool:
        """Return whether a model must have been ready once before the server is ready for the first time.

        Args:
            name: Of the model.
            is_ready_needed: What the model itself says; None for nothing.
        """
        return bool(self.word) or name in self.names if is_ready_needed is None else is_ready_needed

    def holds(self, models: Iterable[Named]) -> bool:
        """Return whether a server that was ready once is ready while its models are as they are."""
        needed = [model for model in models if self.needs(model.name, model.traits.is_ready_needed)]
        ready = [model.engine.is_ready for model in needed]
        if self.word == ANY:
            return any(ready) and all(model.engine.is_ready for model in needed if model.traits.is_ready_needed)
        return bool(ready) and all(ready)


class Readiness:
    """Whether the server is ready, by a rule.

    For the first time it is when every model that the rule needs is ready: a rollout with a model that cannot be loaded must not
    go on to the pods that have the last one that could. After that the rule alone decides.
    """

    def __init__(self, rule: ReadyRule, known: Iterable[str] = ()) -> None:
        """Start with what is known.

        Args:
            rule: The setting.
            known: Names of models that have been ready before, in another process.
        """
        self._rule = rule
        self._known = set(known)
        self._has_begun = False

    def note(self, models: Sequence[Named]) -> None:
        """Take note of how models are; call it whenever one has become ready or has stopped being so."""
        self._known |= {model.name for model in models if model.engine.is_ready}
        if all(model.name in self._known for model in models if self._is_needed(model)):
            self._has_begun = self._has_begun or bool(models)

    def is_met(self, models: Sequence[Named]) -> bool:
        """Return whether the server is ready while its models are as they are; from any thread."""
        has_begun = self._has_begun or all(model.engine.is_ready for model in models if self._is_needed(model))
        return has_begun and self._rule.holds(models)

    def _is_needed(self, model: Named) -> bool:
        return self._rule.needs(model.name, model.traits.is_ready_needed)
