"""Special tokens that a text may name where that is asked for: those of a foreign tokeniser that do not belong to its structure.

Start and end of a sequence, padding, the unknown token, separators and languages do: no text can name them.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dragoman.model.config import ModelConfig
from dragoman.model.generation import Languages
from dragoman.model.importers.files import ForeignError, listed, load_object_if_any
from dragoman.model.importers.generation import ForeignGeneration
from dragoman.model.importers.report import Report
from dragoman.model.importers.tokenizers import (
    ADDED_FILE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_FILE,
    added_entries,
    read_token_ids,
    special_entries,
)
from dragoman.model.importers.weights import TOKENIZER_CONFIG, Foreign
from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.names import SPACE, is_name
from dragoman.model.text.piece_model import CONTROL, PieceModel
from dragoman.model.text.sentencepiece import SentencePieceTokenizer
from dragoman.model.text.special_tokens import SpecialToken
from dragoman.model.text.tokenizer import Tokenizer
from dragoman.model.text.tokenizers import Tokenizers

_STRUCTURE: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls"))
_NAMES: Final = frozenset({"<s>", "</s>", "<unk>", "<pad>"})
# As families write them; those of the model's own languages are known by their ids, too.
_LANGUAGE: Final = re.compile(r">>.+<<|<2[\w-]+>|__[a-z]{2,3}__|[a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2}")
_SENTINEL: Final = "<extra_id_0>"
_T5_SENTINELS: Final = 100  # where no file says how many
Token = dict[str, Any]


def with_special_tokens(
    foreign: Foreign, tokenizers: Tokenizers, config: ModelConfig, generation: ForeignGeneration, is_read: bool, report: Report
) -> Tokenizers:
    """Return the tokenisers with the special tokens that a source may name.

    Args:
        foreign: The folder.
        tokenizers: Its tokenisers.
        config: Of the network.
        generation: Template and languages.
        is_read: Whether they are tokens where a request does not say.
        report: Takes a list of them.

    Raises:
        ForeignError: If they are to be tokens, and there are none.
    """
    room, structure = min(config.source_vocab_size, config.target_vocab_size), _structure(foreign.path)
    taken = {config.pad_id, config.eos_id, config.decoder_start_id, *_ids_around(generation)}
    tokens = {
        name: token
        for name, token in _hidden(foreign, tokenizers.source, room).items()
        if token["id"] < room and token["id"] not in taken and name not in structure and not _LANGUAGE.fullmatch(name)
    }
    if not tokens:
        if is_read:
            raise ForeignError(f"{foreign.path}: --special-tokens-in-text: its tokeniser has none that a text may name")
        return tokenizers
    became = "tokens" if is_read else "text"
    how = "" if is_read else "; --special-tokens-in-text, or special_tokens_in_text of a request, makes them tokens"
    report.translated.append(f"special tokens that a text names are {became}: {listed(list(tokens))}{how}")
    special = [
        SpecialToken(name, x["id"], x.get("lstrip") is True, x.get("rstrip") is True, x.get("space_id"))
        for name, x in tokens.items()
    ]
    written = {x["id"]: name.replace(" ", SPACE) for name, x in tokens.items() if not x.get("special")}
    source, target = _writing(tokenizers, written)
    return Tokenizers(source, target, tuple(sorted(special, key=lambda token: token.id)))


def _hidden(foreign: Foreign, source: Tokenizer, room: int) -> dict[str, Token]:
    """Return the tokens that a tokeniser knows and finds in no text, by name, each with its id; the model has `room` for ids."""
    added = _added(foreign.path)
    if isinstance(source, JsonTokenizer):
        own: list[Token] = json.loads(source.content()).get("added_tokens", [])
        return {
            x["content"]: {**x, **added.get(x["content"], {}), "id": x["id"]}
            for x in own
            if x.get("special") or is_name(x["content"])
        }
    ids = read_token_ids(foreign.path, foreign.tokenizer.fields)
    if isinstance(source, SentencePieceTokenizer):
        described, table = PieceModel(source.content()), source.settings()["ids"]
        pieces = zip(described.pieces, described.types, table, strict=True)
        found: dict[str, Token] = {piece: {"id": i} for piece, kind, i in pieces if kind == CONTROL and i >= 0}
        # Without a pre-tokeniser that takes spaces off, the library `tokenizers` makes a piece of one before a token.
        splits = load_object_if_any(foreign.path / TOKENIZER_FILE).get("pre_tokenizer")
        has_spaces = isinstance(splits, dict) and splits.get("type") == "Metaspace" and SPACE in described.pieces
        more = {"space_id": table[described.pieces.index(SPACE)]} if has_spaces else {}
        outside = {name: {**x, **more, "id": ids[name]} for name, x in added.items() if name in ids.keys() - described.pieces}
        if foreign.config.fields.get("model_type") in ("t5", "mt5", "umt5") and not ids.keys() & {_SENTINEL, SPACE + _SENTINEL}:
            count = foreign.tokenizer.find("extra_ids", int)
            last = len(table) + (_T5_SENTINELS if count is None else count)
            outside = (_sentinels(range(last - 1, len(table) - 1, -1)) if last <= room else {}) | outside
        return found | outside
    outside = {name: {**x, "id": ids[name]} for name, x in added.items() if name in ids}
    if isinstance(source, ByteTokenizer):
        outside = _sentinels(range(source.settings()["offset"] + 256, source.vocab_size)) | outside
    return outside


def _sentinels(ids: range) -> dict[str, Token]:
    """Return T5's sentinels, which no file need name."""
    return {f"<extra_id_{i}>": {"id": token_id, "special": True} for i, token_id in enumerate(ids)}


def _added(folder: Path) -> dict[str, Token]:
    """Return the descriptions of tokens that were added to a vocabulary, by name."""
    found: dict[str, Token] = {}
    for token in _entries(folder):
        if isinstance(name := token.get("content"), str) and name:
            found[name] = {**found.get(name, {}), **token}
    return found


def _entries(folder: Path) -> Iterator[Token]:
    """Yield each file's description of a token; a later one knows better."""
    for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
        for token in (load_object_if_any(folder / name).get("mask_token"), *special_entries(folder, name)):
            yield {**token, "special": True} if isinstance(token, dict) else {"content": token, "special": True}
    yield from ({"content": name} for name in load_object_if_any(folder / ADDED_FILE))
    yield from added_entries(folder)


def _structure(folder: Path) -> set[str]:
    """Return the names of tokens that are a sequence's structure."""
    files = (load_object_if_any(folder / name) for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG))
    tokens = [file.get(field) for file in files for field in _STRUCTURE]
    return {*_NAMES, *(str(token.get("content")) if isinstance(token, dict) else str(token) for token in tokens)}


def _ids_around(generation: ForeignGeneration) -> set[int]:
    """Return the tokens that go around a text."""
    languages = generation.languages or Languages()
    return {
        token_id
        for affixes in (generation.template, *languages.source, *languages.target)
        for token_id in (*affixes.source_prefix, *affixes.source_suffix, *affixes.target_prefix, affixes.decoder_start_id)
        if token_id is not None
    }


def _writing(tokenizers: Tokenizers, written: dict[int, str]) -> tuple[Tokenizer, Tokenizer]:
    """Return tokenisers whose answers have the names of tokens that are not special, as in other libraries."""
    source, target = tokenizers.source, tokenizers.target
    if source is target and isinstance(source, SentencePieceTokenizer) and written:
        settings = source.settings()
        pieces = {**{int(token_id): piece for token_id, piece in settings["pieces"].items()}, **written}
        source = target = SentencePieceTokenizer(source.content(), settings["ids"], source.eos_id, pieces)
    return source, target
