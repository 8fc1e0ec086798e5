"""What an importer knows of a foreign folder when it asks what is said to the model around a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from dragoman.model.generation import Languages, Template
from dragoman.model.importers.errors import ForeignError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked the importer for; empty where nothing.

    Attributes:
        source_language: Read where a request does not say, or the only one.
        target_language: Written where a request does not say, or the only one.
        task: Of those that `task_specific_params` names.
    """

    source_language: str = ""
    target_language: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A foreign folder, as far as its texts go.

    Attributes:
        path: Where it lies.
        model_type: As `config.json` has it.
        config: Its `config.json`.
        generation: What Transformers' `generate` takes from it; see `generation_fields`.
        tokenizer: Its `tokenizer_config.json`; empty where it has none.
        token_ids: Ids of its tokens by their names, at least of the special ones.
        source_vocab_size: Ids of sources are below it.
        target_vocab_size: Ids of answers are below it.
        wishes: The user's.
    """

    path: Path
    model_type: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    token_ids: Mapping[str, int]
    source_vocab_size: int
    target_vocab_size: int
    wishes: Wishes = field(default_factory=Wishes)

    @property
    def tokenizer_class(self) -> str:
        """The class that Transformers would read the tokeniser with, as far as the folder says, without `Fast`."""
        name = self.tokenizer.get("tokenizer_class") or self.config.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else ""

    def token_id(self, name: str) -> int:
        """Return the id of a token.

        Raises:
            ForeignError: If no file names it.
        """
        if name not in self.token_ids:
            raise ForeignError(f"{self.path}: its tokeniser has no token {name!r}, which goes around every text")
        return self.checked(name, self.token_ids[name])

    def checked(self, name: str, token_id: int) -> int:
        """Return an id that the model has a row for.

        Raises:
            ForeignError: If it has none.
        """
        if not 0 <= token_id < self.source_vocab_size:
            raise ForeignError(f"{self.path}: token {name!r} has the id {token_id}, the model room for {self.source_vocab_size}")
        return token_id

    def forced_first(self) -> int | None:
        """Return the token that `generate` forces every answer to begin with.

        Raises:
            ForeignError: If it is none of the model's.
        """
        value = self.generation.get("forced_bos_token_id")
        if value is None:
            return None
        if not is_token(value, self.target_vocab_size):
            raise ForeignError(f"{self.path}: forced_bos_token_id {value!r:.40} is no token of the {self.target_vocab_size}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What is said to a model around a text.

    Attributes:
        template: Around every text.
        languages: Its languages; None where it is not known to have any.
        notes: What was found, a sentence each.
    """

    template: Template
    languages: Languages | None
    notes: Sequence[str] = ()

    @property
    def num_forced(self) -> int:
        """Tokens that every answer is forced to begin with, whatever its language."""
        targets = () if self.languages is None else self.languages.target
        return len(self.template.target_prefix) + max((len(language.target_prefix) for language in targets), default=0)


def is_token(value: Any, vocab_size: int) -> TypeGuard[int]:
    """Whether a value of a JSON file is a token of a vocabulary."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
