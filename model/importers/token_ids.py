"""The ids of a foreign tokeniser's tokens by their names: those it adds to a text are looked up here, whatever file names them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.settings import load_object, read

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILE = "vocab.json"
ADDED_FILE = "added_tokens.json"
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model")
_MAX_SENTENCEPIECE_BYTES = 1 << 26
# Before the pieces of a sentencepiece model, mBART and NLLB have tokens of fairseq's.
_FAIRSEQ = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}


def read_token_ids(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a folder's tokens by name; those of a piece of text are among them where a file names them.

    Args:
        folder: The foreign folder.
        tokenizer: Its `tokenizer_config.json`.

    Raises:
        ForeignError: If a file is damaged.
    """
    return {**dict(_pieces(folder)), **added_tokens(folder, tokenizer)}


def added_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that were added to a vocabulary, in files of their own; arguments and errors as of `read_token_ids`."""
    found: dict[str, int] = {}
    if (folder / ADDED_FILE).exists():
        found.update(_checked(folder / ADDED_FILE, load_object(folder / ADDED_FILE).items()))
    added = tokenizer.get("added_tokens_decoder")
    if isinstance(added, dict):
        path = folder / "tokenizer_config.json"
        found.update(_checked(path, ((_content(token), _whole(index)) for index, token in added.items())))
    return found


def family_tokens(codes: Sequence[str], token_ids: Mapping[str, int], folder: Path, is_fairseq: bool) -> dict[str, int]:
    """Return the ids of a family's language tokens where the files may not name them: after all pieces, in the family's order.

    Args:
        codes: The family's tokens, in its order.
        token_ids: What `read_token_ids` found.
        folder: The foreign folder.
        is_fairseq: Whether four tokens of fairseq's replace three of the sentencepiece model.
    """
    found = {code: token_ids[code] for code in codes if code in token_ids}
    if found:
        return found
    if is_fairseq:
        path = _sentencepiece(folder)
        first = 0 if path is None else _processor(path).GetPieceSize() + 1
    else:
        path = folder / VOCABULARY_FILE
        first = len(load_object(path)) if path.exists() else 0
    return {code: first + index for index, code in enumerate(codes)} if first else {}


def _pieces(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the pieces of the file that says most about ids."""
    if (path := folder / TOKENIZER_FILE).exists():
        yield from _tokenizers_pieces(path)
    elif (path := folder / VOCABULARY_FILE).exists():
        yield from _checked(path, load_object(path).items())
    elif (model := _sentencepiece(folder)) is not None:
        processor = _processor(model)
        if model.name.startswith("sentencepiece.bpe"):
            yield from _FAIRSEQ.items()
        else:
            yield from ((processor.IdToPiece(index), index) for index in range(processor.GetPieceSize()))


def _tokenizers_pieces(path: Path) -> Iterator[tuple[str, int]]:
    content = load_object(path)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from _checked(path, vocabulary.items())
    elif isinstance(vocabulary, list):
        yield from _checked(
            path, ((piece[0] if isinstance(piece, list) and piece else None, i) for i, piece in enumerate(vocabulary))
        )
    added = content.get("added_tokens")
    if isinstance(added, list):
        yield from _checked(path, ((_content(token), token.get("id") if isinstance(token, dict) else None) for token in added))


def _checked(path: Path, pairs: Any) -> Iterator[tuple[str, int]]:
    for token, index in pairs:
        if not isinstance(token, str) or not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ForeignError(f"{path}: {token!r:.60} and {index!r:.60} are not a token and its id")
        yield token, index


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _whole(index: Any) -> Any:
    return int(index) if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 10 else index


def _sentencepiece(folder: Path) -> Path | None:
    return next((folder / name for name in SENTENCEPIECE_FILES if (folder / name).exists()), None)


def _processor(path: Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(read(path, _MAX_SENTENCEPIECE_BYTES))
    except (RuntimeError, OSError, ValueError) as error:
        raise ForeignError(f"{path}: not a sentencepiece model: {error}") from error
    return processor
