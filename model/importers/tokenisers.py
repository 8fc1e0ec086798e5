"""The tokenisers of foreign folders: which files they are in, and which of the model's ids a piece has."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dragoman.model.config import ModelConfig
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.foreign import Foreign
from dragoman.model.importers.report import Report
from dragoman.model.importers.settings import load_object, read
from dragoman.model.importers.token_ids import added_tokens, read_token_ids
from dragoman.model.importers.weights import listed
from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.id_tables import ids_by_piece, same_ids, shifted_ids
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.names import SPACE, is_name
from dragoman.model.text.piece_model import PieceModel, with_names_as_text
from dragoman.model.text.sentencepiece import SentencePieceTokenizer
from dragoman.model.text.tokenizer import Tokenizer, TokenizerError
from dragoman.model.text.tokenizers import Tokenizers

TOKENIZERS_JSON: Final = "tokenizer.json"
MAX_FILE_BYTES: Final = 2**26
_SPECIAL: Final = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_BYTES_BEFORE, _BYTES_EXTRA = 3, 125
_M2M100_LANGUAGE: Final = re.compile(r"__[a-z]{2,3}__")
_PLAIN: Final = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a folder's files.

    Attributes:
        foreign: The folder.
        config: Of the network: its vocabularies and special tokens.
        report: Told what was found, and what is otherwise than one may think.
        names: Ids of the tokens that the files name.
    """

    foreign: Foreign
    config: ModelConfig
    report: Report
    names: Mapping[str, int]

    def content(self, name: str) -> bytes:
        """Return what a file of the folder holds."""
        return read(self.foreign.path / name, MAX_FILE_BYTES)

    def ids(self, name: str) -> dict[str, int]:
        """Return the ids of a `vocab.json`."""
        path = self.foreign.path / name
        found = load_object(path)
        for piece, token_id in found.items():
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ForeignError(f"{path}: {piece!r:.60} has the id {token_id!r:.40}")
        return found


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """One way in which a family's tokeniser is kept.

    Attributes:
        names: Its files.
        read: Makes tokenisers of them.
    """

    names: tuple[str, ...]
    read: Callable[[Asked], Tokenizers]


def read_tokenizers(foreign: Foreign, ways: tuple[TokenizerFiles, ...], config: ModelConfig, report: Report) -> Tokenizers:
    """Return a folder's tokenisers: the first way whose files are all there.

    Raises:
        ForeignError: If there is none, or it does not fit the model; names the file.
    """
    asked = Asked(foreign, config, report, read_token_ids(foreign.path, foreign.tokenizer.fields))
    if foreign.is_of_bytes:
        way = TokenizerFiles(("tokenizer_config.json",), _bytes)
    else:
        known = (*ways, TokenizerFiles((TOKENIZERS_JSON,), from_json))
        found = [way for way in known if all((foreign.path / name).exists() for name in way.names)]
        if not found:
            wanted = dict.fromkeys(" and ".join(way.names) for way in known)
            raise ForeignError(f"{foreign.path}: no tokeniser: there is neither {' nor '.join(wanted)}")
        way = found[0]
    path = foreign.path / way.names[0]
    try:
        tokenizers = way.read(asked)
        tokenizers.refuse_other_sizes(config.source_vocab_size, config.target_vocab_size)
    except TokenizerError as error:
        raise ForeignError(f"{path}: {error}") from error
    _refuse_other_end(asked)
    kinds = {tokenizers.source.kind, tokenizers.target.kind}
    sizes = sorted({tokenizers.source.vocab_size, tokenizers.target.vocab_size}, reverse=True)
    counted = " and ".join(f"{size:,}" for size in sizes)
    report.found.append(f"tokeniser: {' and '.join(way.names)} ({' and '.join(sorted(kinds))}), {counted} ids")
    return tokenizers


def _refuse_other_end(asked: Asked) -> None:
    """Refuse an end of sequence that is not the network's."""
    said = asked.foreign.tokenizer.take("eos_token")
    name = said.get("content") if isinstance(said, dict) else said
    known = asked.names.get(name if isinstance(name, str) else "</s>")
    if known is not None and known != asked.config.eos_id:
        raise ForeignError(
            f"{asked.foreign.path}: the end of sequence is {known} in the tokeniser and {asked.config.eos_id} in the model"
        )


def from_json(asked: Asked) -> Tokenizers:
    """Read `tokenizer.json`."""
    try:
        return Tokenizers.shared(_with_rows(asked, JsonTokenizer(asked.content(TOKENIZERS_JSON), asked.config.eos_id)))
    except TokenizerError as error:  # it may be read in another file's place
        raise ForeignError(f"{asked.foreign.path / TOKENIZERS_JSON}: {error}") from error


def from_marian(asked: Asked) -> Tokenizers:
    """Read `source.spm`, `target.spm` and `vocab.json`; a target vocabulary of its own is in `target_vocab.json`."""
    has_two = asked.foreign.config.take("share_encoder_decoder_embeddings") is False
    has_two = has_two or asked.foreign.tokenizer.take("separate_vocabs") is True
    sides: list[Tokenizer] = []
    for model, vocabulary in (("source.spm", "vocab.json"), ("target.spm", "target_vocab.json" if has_two else "vocab.json")):
        ids = asked.ids(vocabulary)
        languages = [name for name in ids if name.startswith(">>") and name.endswith("<<")]
        sides.append(_by_piece(asked, model, vocabulary, ids, [*_SPECIAL, *languages]))
    return Tokenizers(sides[0], sides[1])


def from_m2m100(asked: Asked) -> Tokenizers:
    """Read `sentencepiece.bpe.model` and `vocab.json`."""
    silent = [*_SPECIAL, *(name for name in asked.names if _M2M100_LANGUAGE.fullmatch(name))]
    return Tokenizers.shared(_by_piece(asked, "sentencepiece.bpe.model", "vocab.json", asked.ids("vocab.json"), silent))


def from_fairseq(asked: Asked) -> Tokenizers:
    """Read `sentencepiece.bpe.model` of mBART or NLLB, before whose pieces fairseq has four tokens."""
    others = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    return _of_pieces(asked, "sentencepiece.bpe.model", lambda model: shifted_ids(model, 1, others))


def from_pegasus(asked: Asked) -> Tokenizers:
    """Read `spiece.model` of Pegasus, before whose pieces are 103 tokens of its training."""
    said = asked.foreign.tokenizer.find("offset", int)
    offset = 103 if said is None else said
    return _of_pieces(asked, "spiece.model", lambda model: shifted_ids(model, offset, {"<pad>": 0, "</s>": 1}))


def from_t5(asked: Asked) -> Tokenizers:
    """Read `spiece.model` of T5, whose ids are the model's."""
    return _of_pieces(asked, "spiece.model", same_ids)


def from_byte_pairs(asked: Asked) -> Tokenizers:
    """Read `vocab.json` and `merges.txt`: byte-level BPE."""
    ids = asked.ids("vocab.json")
    added = {name: token_id for name, token_id in asked.names.items() if name not in ids}
    if (asked.foreign.path / TOKENIZERS_JSON).exists() and added:
        return _preferring_json(asked, "vocab.json")
    special = [*_SPECIAL, *(name for name in asked.names if is_name(name))]
    eos_id = asked.config.eos_id
    tokenizer = JsonTokenizer.from_byte_pairs(asked.content("vocab.json"), asked.content("merges.txt"), special, eos_id)
    if added or asked.foreign.tokenizer.find("add_prefix_space", bool):
        description: dict[str, Any] = json.loads(tokenizer.content())
        description["pre_tokenizer"] |= {"add_prefix_space": asked.foreign.tokenizer.find("add_prefix_space", bool) is True}
        description["model"]["vocab"] |= added
        silent = _special_tokens(asked.foreign.path)
        description["added_tokens"] += [
            {"id": token_id, "content": text, **_PLAIN, "special": text in silent} for text, token_id in added.items()
        ]
        tokenizer = JsonTokenizer(json.dumps(description).encode(), eos_id)
    return Tokenizers.shared(_with_rows(asked, tokenizer))


def _with_rows(asked: Asked, tokenizer: JsonTokenizer) -> JsonTokenizer:
    """Return a tokeniser without the special tokens at its end that the model has no row for, such as BART's mask.

    No text has them. One that lacks rows for other tokens, too, is returned as it is, to be refused.
    """
    room = min(asked.config.source_vocab_size, asked.config.target_vocab_size)
    if tokenizer.vocab_size <= room:
        return tokenizer
    description: dict[str, Any] = json.loads(tokenizer.content())
    beyond = {token["content"]: token["id"] for token in description.get("added_tokens", []) if token["id"] >= room}
    special = {token["id"] for token in description.get("added_tokens", []) if token.get("special")}
    if set(beyond.values()) != set(range(room, tokenizer.vocab_size)) or not special >= set(beyond.values()):
        return tokenizer
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < room]
    model = description["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][:room]
    else:
        model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token not in beyond}
    asked.report.translated.append(f"the model has no row for {listed(list(beyond))}: left out, as no text has it")
    return JsonTokenizer(json.dumps(description, ensure_ascii=False).encode(), asked.config.eos_id)


def _bytes(asked: Asked) -> Tokenizers:
    """ByT5's: no file, a token is a byte."""
    if added := _text_tokens(asked, ()):
        asked.report.ignored.append(
            f"added tokens are not written, and not looked for in texts unless special tokens are: {listed(list(added))}"
        )
    extra = asked.foreign.tokenizer.find("extra_ids", int)
    tokenizer = ByteTokenizer(asked.config.eos_id, _BYTES_BEFORE, _BYTES_EXTRA if extra is None else extra)
    return Tokenizers.shared(tokenizer)


def _by_piece(asked: Asked, model: str, vocabulary: str, ids: Mapping[str, int], silent: Collection[str]) -> Tokenizer:
    """Return the tokeniser of a SentencePiece model whose pieces have ids in a vocabulary of their own."""
    unknown = ids.get("<unk>")
    if unknown is None:
        raise ForeignError(f"{asked.foreign.path / vocabulary}: <unk> is missing")
    try:
        content, _ = with_names_as_text(asked.content(model))
        table, others = ids_by_piece(content, ids, unknown, silent)
        files = added_tokens(asked.foreign.path, asked.foreign.tokenizer.fields)
        added = {name: token_id for name, token_id in _text_tokens(asked, ids).items() if name in files and name not in silent}
        return SentencePieceTokenizer(content, table, asked.config.eos_id, {**_written(asked, model, added), **others})
    except TokenizerError as error:  # one of several files
        raise ForeignError(f"{asked.foreign.path / model}: {error}") from error


def _of_pieces(asked: Asked, name: str, table: Callable[[bytes], list[int]]) -> Tokenizers:
    """Return the tokeniser of a SentencePiece model with a family's table of ids, unless `tokenizer.json` knows better."""
    content, _ = with_names_as_text(asked.content(name))
    ids = table(content)
    pieces = dict(zip(PieceModel(content).pieces, ids, strict=True))
    if (asked.foreign.path / TOKENIZERS_JSON).exists():
        moved = [piece for piece, token_id in pieces.items() if asked.names.get(piece, token_id) != token_id]
        if moved or _text_tokens(asked, pieces):
            return _preferring_json(asked, name)
    others = _written(asked, name, _text_tokens(asked, pieces))
    return Tokenizers.shared(SentencePieceTokenizer(content, ids, asked.config.eos_id, others))


def _written(asked: Asked, name: str, added: Mapping[str, int]) -> dict[int, str]:
    """Return the pieces of added tokens that a SentencePiece model has not; say what becomes of them."""
    unsought = listed(list(added))
    told = f"added tokens are written, but not looked for in texts unless special tokens are: {name} has them not: {unsought}"
    if added and told not in asked.report.ignored:
        asked.report.ignored.append(told)
    return {token_id: text.replace(" ", SPACE) for text, token_id in added.items()}


def _text_tokens(asked: Asked, known: Collection[str]) -> dict[str, int]:
    """Return the tokens that were added to a vocabulary and are text: no names, not special."""
    special = _special_tokens(asked.foreign.path)
    taken = set(known.values()) if isinstance(known, Mapping) else set()
    return {
        name: token_id
        for name, token_id in asked.names.items()
        if name not in known and token_id not in taken and name not in special and not is_name(name)
    }


def _special_tokens(folder: Path) -> set[str]:
    """Return the names that a folder calls special."""
    found: set[str] = set()
    for name, field in ((TOKENIZERS_JSON, "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        entries = load_object(folder / name).get(field) if (folder / name).exists() else None
        for entry in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("special") and isinstance(entry.get("content"), str):
                found.add(entry["content"])
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        said = load_object(folder / name) if (folder / name).exists() else {}
        for field in ("additional_special_tokens", "extra_special_tokens"):
            values = said.get(field)
            found.update(_content(value) for value in (values if isinstance(values, list) else ()))
    return found


def _content(token: Any) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _preferring_json(asked: Asked, name: str) -> Tokenizers:
    """Return what `tokenizer.json` says where it says more than another file."""
    asked.report.translated.append(f"{TOKENIZERS_JSON} has tokens that {name} has not, or other ids: it is read in its place")
    return from_json(asked)
