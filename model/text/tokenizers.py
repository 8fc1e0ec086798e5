"""The tokenisers of a model's two sides, and the folder that they are kept in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """What reads sources and what writes targets: the same object where a model has one vocabulary.

    Attributes:
        source: Of what is to be translated.
        target: Of what it is translated to.
    """

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def shared(cls, tokenizer: Tokenizer) -> Self:
        """Return one tokeniser for both sides."""
        return cls(tokenizer, tokenizer)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a directory that `save` wrote.

        Raises:
            TokenizerError: Naming the file and what is wrong with it.
        """
        return cls.shared(ByteLevelTokenizer.load(directory))

    def save(self, directory: Path) -> None:
        """Write into an existing directory."""
        self.byte_level().save(directory)

    def byte_level(self) -> ByteLevelTokenizer:
        """Return the one tokeniser of our own that both sides have: the kind that can be trained.

        Raises:
            TokenizerError: If they have others.
        """
        if self.source is not self.target or not isinstance(self.source, ByteLevelTokenizer):
            raise TokenizerError("the vocabulary is another library's: only one that was learnt here can be trained further")
        return self.source

    def refuse_other_sizes(self, source_vocab_size: int, target_vocab_size: int) -> None:
        """Refuse a model that has no row for some token.

        Raises:
            TokenizerError: Saying how many tokens there are, and how many the model has.
        """
        for tokenizer, room in ((self.source, source_vocab_size), (self.target, target_vocab_size)):
            if tokenizer.vocab_size > room:
                raise TokenizerError(f"the tokeniser has {tokenizer.vocab_size} tokens, the model room for {room}")

    def is_same(self, other: "Tokenizers") -> bool:
        """Whether texts and ids mean the same to both."""
        return all(
            ours.kind == theirs.kind and ours.files() == theirs.files()
            for ours, theirs in ((self.source, other.source), (self.target, other.target))
        )
