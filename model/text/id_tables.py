"""Which of a model's ids each piece of a SentencePiece file has: tables as model families make them."""

from collections.abc import Collection, Mapping

from dragoman.model.text.piece_model import CONTROL, UNUSED, PieceModel
from dragoman.model.text.sentencepiece import NO_ID


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
        offset: What is added to an id.
        others: Ids of the pieces that are not shifted; of a piece the file lacks, nothing is made.

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
        vocabulary: Ids by piece; what is not in it has the unknown id.
        unknown_id: The model's id of what is unknown.
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
