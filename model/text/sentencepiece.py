"""SentencePiece models, encoded by the library of that name, so that ids are its own by definition; a table makes them the model's.

Decoding goes by token: SentencePiece's rules of where the space before a text is taken off are those of its `Decode`. It differs
from that in one thing: bytes that are not UTF-8 become one U+FFFD a bad sequence, as everywhere here, and not one a byte. A silent
token between two bytes of a character does not part them.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from dragoman.model.text.tokenizer import (
    MAX_ID,
    SPACE,
    UNKNOWN_MARK,
    Encode,
    Pieces,
    SpecialToken,
    Tokenizer,
    TokenizerError,
    is_name,
    reason,
    splitting,
)

NO_ID: Final = -1
MAX_PIECES: Final = 1 << 22
MAX_PIECE_CHARACTERS: Final = 1024
# Types of pieces.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
_BYTE_PIECE: Final = re.compile("<0x[0-9A-F]{2}>")


class SentencePieceTokenizer(Tokenizer):
    """A `.model` file, and the ids that a model knows its pieces by."""

    kind = "sentencepiece"

    def __init__(self, model: bytes, ids: Sequence[int], eos_id: int, pieces: Mapping[int, str] | None = None) -> None:
        """Load a model.

        Args:
            model: Content of the `.model` file.
            ids: The model's id of each piece, in the order of the file; `NO_ID` for one that is never in a text (control, unused)
                and that the model does not have.
            eos_id: The end-of-sequence token, the model's id.
            pieces: Texts of the model's other ids, as pieces: those of a vocabulary that this file does not have, and those of
                control pieces that answers shall show. A character or a run of them that is unknown here but is one of those gets
                its id, as Marian and M2M100 do it; one that is a name stays unknown.

        Raises:
            TokenizerError: If the file is damaged, or the table does not fit it.
        """
        described = PieceModel(model)
        self._model, self._ids, self._pieces = model, list(ids), dict(pieces or {})
        _check_ids(described, self._ids, eos_id, self._pieces)
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise TokenizerError(f"not a SentencePiece model: {reason(error)}") from error
        if len(self._processor) != len(self._ids):
            raise TokenizerError(f"{len(self._processor)} pieces were loaded of {len(self._ids)}")
        self.eos_id = eos_id
        self.vocab_size = 1 + max(eos_id, *self._ids, *self._pieces)
        self._is_identity = self._ids == list(range(len(self._ids)))
        self._unknown_id = described.unknown_id
        self._found = {piece: token_id for token_id, piece in self._pieces.items() if not is_name(piece)}
        self._table = _table(described, self._ids, self._pieces, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self._to_model(text, self._processor.encode(text, out_type=int))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores."""
        encoded = self._processor.encode(list(texts), out_type=int)
        return [self._to_model(text, ids) for text, ids in zip(texts, encoded, strict=True)]

    def reading(self, tokens: Sequence[SpecialToken]) -> Encode:
        """Return an encoder of texts with these tokens; the file's own are pieces of the text around them, as in the library."""
        own = set(PieceModel(self._model).pieces)
        inside = {token.content for token in tokens if token.content in own}
        if not inside:
            return splitting(tokens, self.encode)
        pieces = {token_id: piece for token_id, piece in self._pieces.items() if piece not in inside}
        shown = SentencePieceTokenizer(with_pieces_in_text(self._model, inside), self._ids, self.eos_id, pieces)
        return splitting([token for token in tokens if token.content not in inside], shown.encode)

    def word_bytes(self, token_id: int) -> bytes:
        return UNKNOWN_MARK if token_id == self._ids[self._unknown_id] else self.token_bytes(token_id)

    def content(self) -> bytes:
        return self._model

    def settings(self) -> Mapping[str, Any]:
        return {"eos_id": self.eos_id, "ids": self._ids, "pieces": {str(i): piece for i, piece in self._pieces.items()}}

    def _to_model(self, text: str, ids: list[int]) -> list[int]:
        """Return the model's ids of the library's."""
        if self._found and self._unknown_id in ids:
            written = self._processor.encode(text, out_type=str)
            return [
                self._found.get(piece, self._ids[i]) if i == self._unknown_id else self._ids[i]
                for i, piece in zip(ids, written, strict=True)
            ]
        return ids if self._is_identity else list(map(self._ids.__getitem__, ids))


class PieceModel:
    """Content of a `.model` file, read before native code does.

    Attributes:
        pieces: Text of every id.
        types: Type of every id: `UNKNOWN`, `CONTROL`, …
        unknown_id: The unknown piece.
        unknown_text: Its text after decoding.
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


def _check_ids(described: PieceModel, ids: Sequence[int], eos_id: int, pieces: Mapping[int, str]) -> None:
    """Refuse a table that lacks the id of a piece that a text may have."""
    if len(ids) != len(described.pieces):
        raise TokenizerError(f"ids of {len(ids)} pieces, but the model has {len(described.pieces)}")
    for token_id in (eos_id, *pieces, *ids):
        if not NO_ID <= token_id <= MAX_ID:
            raise TokenizerError(f"id {token_id} is not in 0 to {MAX_ID}")
    if eos_id < 0 or any(token_id < 0 for token_id in pieces):
        raise TokenizerError("the end-of-sequence token or a piece beside the model has no id")
    taken = set(pieces)
    for piece, kind, token_id in zip(described.pieces, described.types, ids, strict=True):
        if token_id == NO_ID and kind not in (CONTROL, UNUSED):
            raise TokenizerError(f"the piece {piece!a} has no id")
        if token_id != ids[described.unknown_id] and kind not in (CONTROL, UNUSED):
            if token_id in taken:
                raise TokenizerError(f"id {token_id} is that of {piece!a} and of another piece")
            taken.add(token_id)


def _table(described: PieceModel, ids: Sequence[int], pieces: Mapping[int, str], size: int) -> Pieces:
    """Return the bytes that each of the model's ids adds to a text."""
    later, first, is_opening = [b""] * size, dict[int, bytes](), [True] * size
    unknown = ids[described.unknown_id]
    is_cut = described.has_dummy_prefix or described.is_stripped
    entries = [*zip(ids, described.pieces, described.types, strict=True), *((i, piece, None) for i, piece in pieces.items())]
    for token_id, piece, kind in reversed(entries):  # where two have one id, the first one's text counts
        if token_id == NO_ID or (token_id == unknown and kind != UNKNOWN) or (kind == CONTROL and token_id in pieces):
            continue
        later[token_id], is_opening[token_id] = b"", True
        first.pop(token_id, None)
        if kind == CONTROL:
            continue
        if kind == BYTE:
            later[token_id], is_opening[token_id] = bytes([int(piece[3:5], 16)]), False
            continue
        text = described.unknown_text if kind == UNKNOWN else piece.replace(SPACE, " ")
        later[token_id] = text.encode()
        is_first_cut = is_cut and kind != UNKNOWN and piece.startswith(SPACE)
        if is_first_cut:
            first[token_id] = text[1:].encode()
        # A space that was put before the text is taken off once; where spaces are removed, all those at the start are.
        is_opening[token_id] = not (text[1:] if is_first_cut else text) and (described.is_stripped or not is_first_cut)
    return Pieces(later, first, [token_id for token_id, is_still in enumerate(is_opening) if is_still])


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


def same_ids(model: bytes) -> list[int]:
    """Return the table of a model that has the file's own ids, as T5's.

    Raises:
        TokenizerError: If the file is damaged.
    """
    return list(range(len(PieceModel(model).pieces)))


def shifted_ids(model: bytes, offset: int, others: Mapping[str, int]) -> list[int]:
    """Return the table of a model that has all ids shifted but for some pieces: mBART's and NLLB's (1), Pegasus's (103).

    Args:
        model: Content of the `.model` file.
        offset: Added to an id.
        others: Ids of the pieces that are not shifted; those of pieces that the file lacks have no effect.

    Raises:
        TokenizerError: If the file is damaged.
    """
    return [others.get(piece, i + offset) for i, piece in enumerate(PieceModel(model).pieces)]


def ids_by_piece(
    model: bytes, vocabulary: Mapping[str, int], unknown_id: int, silent: Collection[str] = ()
) -> tuple[list[int], dict[int, str]]:
    """Return the table of a model with a `vocab.json` of its own, as Marian's and M2M100's, and the other pieces of that.

    Args:
        model: Content of the `.model` file.
        vocabulary: Ids by piece; other pieces have the unknown id.
        unknown_id: The model's id of the unknown piece.
        silent: Names of tokens that are no text, such as `<pad>`: they are not among the other pieces.

    Raises:
        TokenizerError: If the file is damaged.
    """
    described = PieceModel(model)
    ids = []
    for i, (piece, kind) in enumerate(zip(described.pieces, described.types, strict=True)):
        lacking = NO_ID if kind in (CONTROL, UNUSED) else unknown_id
        ids.append(unknown_id if i == described.unknown_id else vocabulary.get(piece, lacking))
    taken = {*ids, unknown_id}
    return ids, {i: piece for piece, i in vocabulary.items() if i not in taken and piece not in silent}
