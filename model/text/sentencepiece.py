"""SentencePiece models, encoded by the library of that name, so that ids are its own by definition; a table makes them the model's.

Decoding goes by token: SentencePiece's rules of where the space before a text is taken off are those of its `Decode`. It differs
from that in one thing: bytes that are not UTF-8 become one U+FFFD a bad sequence, as everywhere here, and not one a byte. A silent
token between two bytes of a character does not part them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sentencepiece import SentencePieceProcessor

from dragoman.model.text.names import SPACE, is_name
from dragoman.model.text.piece_model import BYTE, CONTROL, UNKNOWN, UNUSED, PieceModel, with_pieces_in_text
from dragoman.model.text.pieces import PieceDetokenizer, Pieces
from dragoman.model.text.reading import reason
from dragoman.model.text.special_tokens import Encode, SpecialToken, splitting
from dragoman.model.text.tokenizer import UNKNOWN_MARK, TokenizerError

MAX_ID = (1 << 24) - 1
NO_ID = -1


class SentencePieceTokenizer:
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
        """Return the ids of a text, without special tokens."""
        return self._to_model(text, self._processor.encode(text, out_type=int))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores."""
        encoded = self._processor.encode(list(texts), out_type=int)
        return [self._to_model(text, ids) for text, ids in zip(texts, encoded, strict=True)]

    def reading(self, tokens: Sequence[SpecialToken]) -> Encode:
        """Return what encodes a text with these tokens; the file's own are pieces of the text around them, as in the library."""
        own = set(PieceModel(self._model).pieces)
        inside = {token.content for token in tokens if token.content in own}
        if not inside:
            return splitting(tokens, self.encode)
        pieces = {token_id: piece for token_id, piece in self._pieces.items() if piece not in inside}
        shown = SentencePieceTokenizer(with_pieces_in_text(self._model, inside), self._ids, self.eos_id, pieces)
        return splitting([token for token in tokens if token.content not in inside], shown.encode)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are silent, the unknown one is ` ⁇ `, bytes that are not UTF-8 become U+FFFD."""
        return self._table.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text, in UTF-8; nothing for a special token, or one that only pads a model's vocabulary."""
        return self._table.later(token_id)

    def word_bytes(self, token_id: int) -> bytes:
        """Return what a token is to the words of an encoded text: its bytes, and for what is unknown a mark without spaces."""
        return UNKNOWN_MARK if token_id == self._ids[self._unknown_id] else self.token_bytes(token_id)

    def detokenizer(self) -> PieceDetokenizer:
        """Return the start of an empty text."""
        return self._table.detokenizer()

    def content(self) -> bytes:
        """Return the `.model` file."""
        return self._model

    def settings(self) -> Mapping[str, Any]:
        """Return what else it was made of."""
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


def _check_ids(described: PieceModel, ids: Sequence[int], eos_id: int, pieces: Mapping[int, str]) -> None:
    """Refuse a table that does not say what every piece is that a text may have."""
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
    """Return what each of the model's ids adds to a text."""
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
