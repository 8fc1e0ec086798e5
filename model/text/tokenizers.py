"""The tokenisers of a model's two sides, and the folder that they are kept in.

`text.json` has the kind and the ids of each side; its file lies beside it. Our own kind needs none: without `text.json`,
`tokenizer.json` is its file.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import msgspec
from msgspec import Meta, Struct

from dragoman.model.files import replaced
from dragoman.model.text.byte_level import FILE_NAME, ByteLevelTokenizer, ByteTokenizer
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.tokenizer import Encode, Id, SpecialToken, Tokenizer, TokenizerError, read

if TYPE_CHECKING:
    from dragoman.model.text.sentencepiece import SentencePieceTokenizer

TEXT_FILE: Final = "text.json"
FORMAT_VERSION: Final = 1

IdOrNone = Annotated[int, Meta(ge=-1, lt=1 << 24)]
FileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]


class ByteLevelSide(Struct, tag="byte_level", frozen=True, forbid_unknown_fields=True):
    """Our own kind."""

    file: FileName

    def load(self, directory: Path) -> ByteLevelTokenizer:
        return ByteLevelTokenizer.load(directory, self.file)


class SentencePieceSide(Struct, tag="sentencepiece", frozen=True, forbid_unknown_fields=True):
    """A `.model` file and its table; fields as `SentencePieceTokenizer` has them."""

    file: FileName
    eos_id: Id
    ids: list[IdOrNone]
    pieces: dict[str, str] = {}

    def load(self, directory: Path) -> "SentencePieceTokenizer":
        from dragoman.model.text.sentencepiece import SentencePieceTokenizer  # 5 MB that our own kind does without

        if not all(key.isascii() and key.isdecimal() and len(key) <= 8 for key in self.pieces):
            raise TokenizerError("pieces has an id that is not a number")
        pieces = {int(key): piece for key, piece in self.pieces.items()}
        return SentencePieceTokenizer(read(directory / self.file), self.ids, self.eos_id, pieces)


class JsonSide(Struct, tag="tokenizers", frozen=True, forbid_unknown_fields=True):
    """A file of `tokenizers`."""

    file: FileName
    eos_id: Id

    def load(self, directory: Path) -> JsonTokenizer:
        return JsonTokenizer(read(directory / self.file), self.eos_id)


class ByteSide(Struct, tag="bytes", frozen=True, forbid_unknown_fields=True):
    """Bytes; fields as `ByteTokenizer` has them."""

    eos_id: Id
    offset: Id
    num_extra: Id
    file: None = None

    def load(self, _: Path) -> ByteTokenizer:
        return ByteTokenizer(self.eos_id, self.offset, self.num_extra)


Side = ByteLevelSide | SentencePieceSide | JsonSide | ByteSide
_SUFFIXES: Final = {"byte_level": ".json", "sentencepiece": ".model", "tokenizers": ".json", "bytes": ""}


class TextFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`text.json`."""

    format_version: int  # of this file
    source: Side  # tokeniser of sources
    target: Side | None = None  # tokeniser of targets; None if it is the same
    special_tokens: list[SpecialToken] = []  # those that a source may name, where that is asked for


@dataclass(frozen=True)
class Tokenizers:
    """Tokenisers of sources and of targets: the same object where a model has one vocabulary."""

    source: Tokenizer  # of sources
    target: Tokenizer  # of targets
    special_tokens: tuple[SpecialToken, ...] = ()  # those that a source may name, where that is asked for

    @cached_property
    def encode_with_special_tokens(self) -> Encode:
        """Return the ids of a source in which the names of `special_tokens` are these tokens; made when it is first asked for."""
        return self.source.reading(self.special_tokens)

    @cached_property
    def longest_special_token(self) -> int:
        """Characters of the longest name of `special_tokens`; 0 if there are none."""
        return max((len(token.content) for token in self.special_tokens), default=0)

    @classmethod
    def shared(cls, tokenizer: Tokenizer) -> Self:
        """Return one tokeniser for both sides."""
        return cls(tokenizer, tokenizer)

    @classmethod
    def load(cls, directory: Path, listed: Collection[str] | None = None) -> Self:
        """Read a directory that `save` wrote.

        Args:
            directory: See above.
            listed: Names of the files that may be read; None for any.

        Raises:
            TokenizerError: Naming the file and what is wrong with it.
        """
        path = directory / TEXT_FILE
        if not (os.path.lexists(path) if listed is None else TEXT_FILE in listed):
            _refuse_unlisted(directory, FILE_NAME, listed)
            return cls.shared(ByteLevelTokenizer.load(directory))
        content = read(path)
        try:
            described = msgspec.json.decode(content, type=TextFile)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TokenizerError(f"{path}: {error}") from error
        if described.format_version != FORMAT_VERSION:
            raise TokenizerError(f"{path}: format_version is {described.format_version}, not {FORMAT_VERSION}")
        for side in (described.source, described.target):
            if side is not None:
                _refuse_unlisted(directory, side.file or TEXT_FILE, listed)
        source = _load(directory, described.source)
        target = source if described.target is None else _load(directory, described.target)
        return cls(source, target, tuple(described.special_tokens))

    def save(self, directory: Path) -> None:
        """Write into an existing directory."""
        path = directory / TEXT_FILE
        if self.source is self.target and isinstance(self.source, ByteLevelTokenizer):
            self.source.save(directory)
            path.unlink(missing_ok=True)  # of a model that was here before
            return
        is_shared = self.source is self.target
        described: dict[str, Any] = {"format_version": FORMAT_VERSION}
        described["source"] = _save(directory, "shared" if is_shared else "source", self.source)
        if not is_shared:
            described["target"] = _save(directory, "target", self.target)
        if self.special_tokens:
            described["special_tokens"] = self.special_tokens
        with replaced(path) as temporary:
            temporary.write_bytes(msgspec.json.encode(described))
        (directory / FILE_NAME).unlink(missing_ok=True)

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
        for token in self.special_tokens:
            if max(token.id, token.space_id or 0) >= source_vocab_size or token.id == self.source.eos_id:
                raise TokenizerError(f"no text can name the special token {token.content!a:.60}, which is {token.id}")

    def is_same(self, other: "Tokenizers") -> bool:
        """Return whether texts and ids mean the same to both."""
        return self.special_tokens == other.special_tokens and all(
            (ours.kind, ours.settings(), ours.content()) == (theirs.kind, theirs.settings(), theirs.content())
            for ours, theirs in ((self.source, other.source), (self.target, other.target))
        )


def _refuse_unlisted(directory: Path, name: str, listed: Collection[str] | None) -> None:
    if listed is not None and name not in listed:
        raise TokenizerError(f"{directory / name}: is not listed, so nobody vouches for it")


def _load(directory: Path, side: Side) -> Tokenizer:
    """Read one side; complaints name its file."""
    try:
        return side.load(directory)
    except TokenizerError as error:
        path = directory / (side.file or TEXT_FILE)
        raise error if str(path) in str(error) else TokenizerError(f"{path}: {error}") from error


def _save(directory: Path, name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write one side's file; return its entry in `text.json`."""
    described = {"type": tokenizer.kind, **tokenizer.settings()}
    if content := tokenizer.content():
        described["file"] = f"{name}{_SUFFIXES[tokenizer.kind]}"
        with replaced(directory / described["file"]) as temporary:
            temporary.write_bytes(content)
    return described
