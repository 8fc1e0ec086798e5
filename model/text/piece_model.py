"""A SentencePiece `.model` file as protobuf: pieces, their types and flags of the normaliser, read before native code does."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from dragoman.model.text.names import is_name
from dragoman.model.text.tokenizer import TokenizerError

MAX_PIECES: Final = 1 << 22
MAX_PIECE_CHARACTERS: Final = 1024

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class PieceModel:
    """What a `.model` file says.

    Attributes:
        pieces: Of every id, its text.
        types: Of every id, what it is: `NORMAL`, `UNKNOWN`, …
        unknown_id: The piece of what has none.
        unknown_text: What it is decoded to.
        has_dummy_prefix: Whether a space is put before a text.
        is_stripped: Whether spaces around a text, and all but one between words, are taken off.
    """

    def __init__(self, content: bytes) -> None:
        """Read it.

        Raises:
            TokenizerError: If it is damaged, or if texts were to be changed after decoding, which is not done here.
        """
        proto = parsed(content)
        self.pieces: list[str] = [entry.piece for entry in proto.pieces]
        self.unknown_text: str = proto.trainer_spec.unk_surface
        self.types: list[int] = [entry.type for entry in proto.pieces]
        if not 0 < len(self.pieces) <= MAX_PIECES:
            raise TokenizerError(f"{len(self.pieces)} pieces; 1 to {MAX_PIECES} can be read")
        if max(map(len, self.pieces)) > MAX_PIECE_CHARACTERS:
            raise TokenizerError(f"a piece has more than {MAX_PIECE_CHARACTERS} characters")
        if self.types.count(UNKNOWN) != 1:
            raise TokenizerError(f"{self.types.count(UNKNOWN)} pieces stand for what is unknown, where there must be one")
        for piece, kind in zip(self.pieces, self.types, strict=True):
            if kind == BYTE and not _BYTE_PIECE.fullmatch(piece):
                raise TokenizerError(f"the piece {piece!a} of a byte is not written as one")
        if proto.denormalizer_spec.precompiled_charsmap:
            raise TokenizerError("denormalizer_spec changes texts after decoding, which is not done here")
        self.unknown_id = self.types.index(UNKNOWN)
        self.has_dummy_prefix: bool = proto.normalizer_spec.add_dummy_prefix
        self.is_stripped: bool = proto.normalizer_spec.remove_extra_whitespaces


def parsed(content: bytes) -> Any:
    """Return the protobuf message of a `.model` file.

    Raises:
        TokenizerError: If it is none.
    """
    proto: Any = vars(sentencepiece_model_pb2)["ModelProto"]()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise TokenizerError("not a SentencePiece model") from error
    # Where they are not UTF-8, protobuf gives bytes for strings.
    if not all(isinstance(text, str) for text in (proto.trainer_spec.unk_surface, *(entry.piece for entry in proto.pieces))):
        raise TokenizerError("a piece is not UTF-8")
    return proto


def with_names_as_text(content: bytes, is_hidden: Callable[[str], bool] = is_name) -> tuple[bytes, Sequence[str]]:
    """Return a `.model` file in which user-defined pieces that are names are control pieces, and these names.

    SentencePiece cuts user-defined pieces out of any text before it looks at the rest; of a control piece's name it knows nothing.
    So a typed `<2de>` stays five characters.

    Args:
        content: Of the file.
        is_hidden: Which of them are no text; all others stay as they are.

    Raises:
        TokenizerError: If the file is damaged.
    """
    proto = parsed(content)
    hidden = [entry for entry in proto.pieces if entry.type == USER_DEFINED and is_hidden(entry.piece)]
    for entry in hidden:
        entry.type = CONTROL
    return (proto.SerializeToString() if hidden else content), [entry.piece for entry in hidden]


def with_pieces_in_text(content: bytes, names: Collection[str]) -> bytes:
    """Return a `.model` file in which these of its control pieces are user-defined ones again."""
    proto = parsed(content)
    for entry in proto.pieces:
        if entry.type == CONTROL and entry.piece in names:
            entry.type = USER_DEFINED
    found: bytes = proto.SerializeToString()
    return found
