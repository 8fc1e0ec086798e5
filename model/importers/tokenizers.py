"""Tokenisers of foreign folders: the files they are in, the ids of their tokens, special tokens that a text may name."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from dragoman.model.config import ModelConfig
from dragoman.model.importers.files import ForeignError, is_whole, listed, load_object, load_object_if_any, read
from dragoman.model.importers.report import Report
from dragoman.model.importers.weights import TOKENIZER_CONFIG, Foreign
from dragoman.model.text.byte_level import ByteTokenizer
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.sentencepiece import (
    CONTROL,
    PieceModel,
    SentencePieceTokenizer,
    ids_by_piece,
    same_ids,
    shifted_ids,
    with_names_as_text,
)
from dragoman.model.text.tokenizer import SPACE, SpecialToken, Tokenizer, TokenizerError, is_name
from dragoman.model.text.tokenizers import Tokenizers

TOKENIZER_FILE: Final = "tokenizer.json"
VOCABULARY_FILE: Final = "vocab.json"
ADDED_FILE: Final = "added_tokens.json"
SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"
MAX_FILE_BYTES: Final = 2**26
_SENTENCEPIECE_FILES: Final = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model")
# Before the pieces of a sentencepiece model, mBART and NLLB have tokens of fairseq's.
_FAIRSEQ: Final = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
_SPECIAL: Final = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_BYTES_BEFORE, _BYTES_EXTRA = 3, 125
_PEGASUS_OFFSET: Final = 103  # tokens of its training, before the pieces
_M2M100_LANGUAGE: Final = re.compile(r"__[a-z]{2,3}__")
_STRUCTURE: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls"))
# As families write them; those of the model's own languages are known by their ids, too.
_LANGUAGE: Final = re.compile(r">>.+<<|<2[\w-]+>|__[a-z]{2,3}__|[a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2}")
_SENTINEL: Final = "<extra_id_0>"
_T5_SENTINELS: Final = 100  # where no file states their number
_PLAIN: Final = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
Token = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a tokeniser's reader: the folder, the network's configuration, the report, ids of the tokens that files name."""

    foreign: Foreign
    config: ModelConfig
    report: Report
    names: Mapping[str, int]

    @property
    def has_json(self) -> bool:
        """Whether there is a `tokenizer.json`."""
        return (self.foreign.path / TOKENIZER_FILE).exists()

    @property
    def special(self) -> set[str]:
        """Names that the folder calls special."""
        return {name for name, token in _added(self.foreign.path).items() if token.get("special")}

    def content(self, name: str) -> bytes:
        """Return the content of a file of the folder."""
        return read(self.foreign.path / name, MAX_FILE_BYTES)

    def ids(self, name: str) -> dict[str, int]:
        """Return the ids of a `vocab.json`."""
        path = self.foreign.path / name
        return dict(_checked(path, load_object(path).items()))


class TokenizerFiles(NamedTuple):
    """Files that a family's tokeniser is in, and their reader."""

    names: tuple[str, ...]
    read: Callable[[Inputs], Tokenizers]


def read_tokenizers(foreign: Foreign, ways: tuple[TokenizerFiles, ...], config: ModelConfig, report: Report) -> Tokenizers:
    """Return a folder's tokenisers, read from the first of some sets of files that is complete.

    Raises:
        ForeignError: If none is, or the tokeniser does not fit the model; names the file.
    """
    inputs = Inputs(foreign, config, report, read_token_ids(foreign.path, foreign.tokenizer.fields))
    if foreign.is_of_bytes:
        way = TokenizerFiles((TOKENIZER_CONFIG,), _from_bytes)
    else:
        known = (*ways, TokenizerFiles((TOKENIZER_FILE,), from_json))
        found = [way for way in known if all((foreign.path / name).exists() for name in way.names)]
        if not found:
            wanted = dict.fromkeys(" and ".join(way.names) for way in known)
            raise ForeignError(f"{foreign.path}: no tokeniser: there is neither {' nor '.join(wanted)}")
        way = found[0]
    try:
        tokenizers = way.read(inputs)
        tokenizers.refuse_other_sizes(config.source_vocab_size, config.target_vocab_size)
    except TokenizerError as error:
        raise ForeignError(f"{foreign.path / way.names[0]}: {error}") from error
    end = _content(foreign.tokenizer.take("eos_token"))
    known_end = inputs.names.get(end if isinstance(end, str) else "</s>")
    if known_end is not None and known_end != config.eos_id:
        raise ForeignError(f"{foreign.path}: the end of sequence is {known_end} in the tokeniser and {config.eos_id} in the model")
    sides = tokenizers.source, tokenizers.target
    counted = " and ".join(f"{size:,}" for size in sorted({side.vocab_size for side in sides}, reverse=True))
    kinds = " and ".join(sorted({side.kind for side in sides}))
    report.found.append(f"tokeniser: {' and '.join(way.names)} ({kinds}), {counted} ids")
    return tokenizers


def from_json(inputs: Inputs) -> Tokenizers:
    """Read `tokenizer.json`."""
    try:
        return Tokenizers.shared(_with_rows(inputs, JsonTokenizer(inputs.content(TOKENIZER_FILE), inputs.config.eos_id)))
    except TokenizerError as error:  # it may be read in another file's place
        raise ForeignError(f"{inputs.foreign.path / TOKENIZER_FILE}: {error}") from error


def from_marian(inputs: Inputs) -> Tokenizers:
    """Read `source.spm`, `target.spm` and `vocab.json`; a target vocabulary of its own is in `target_vocab.json`."""
    has_two = inputs.foreign.config.take("share_encoder_decoder_embeddings") is False
    has_two = has_two or inputs.foreign.tokenizer.take("separate_vocabs") is True
    sides: list[Tokenizer] = []
    for model, vocabulary in (("source.spm", VOCABULARY_FILE), ("target.spm", "target_vocab.json" if has_two else VOCABULARY_FILE)):
        ids = inputs.ids(vocabulary)
        languages = [name for name in ids if name.startswith(">>") and name.endswith("<<")]
        sides.append(_by_piece(inputs, model, vocabulary, ids, [*_SPECIAL, *languages]))
    return Tokenizers(sides[0], sides[1])


def from_m2m100(inputs: Inputs) -> Tokenizers:
    """Read `sentencepiece.bpe.model` and `vocab.json`."""
    silent = [*_SPECIAL, *(name for name in inputs.names if _M2M100_LANGUAGE.fullmatch(name))]
    ids = inputs.ids(VOCABULARY_FILE)
    return Tokenizers.shared(_by_piece(inputs, "sentencepiece.bpe.model", VOCABULARY_FILE, ids, silent))


def from_byte_pairs(inputs: Inputs) -> Tokenizers:
    """Read `vocab.json` and `merges.txt`: byte-level BPE."""
    ids, eos_id = inputs.ids(VOCABULARY_FILE), inputs.config.eos_id
    added = {name: token_id for name, token_id in inputs.names.items() if name not in ids}
    if inputs.has_json and added:
        return _preferring_json(inputs, VOCABULARY_FILE)
    special = [*_SPECIAL, *(name for name in inputs.names if is_name(name))]
    tokenizer = JsonTokenizer.from_byte_pairs(inputs.content(VOCABULARY_FILE), inputs.content("merges.txt"), special, eos_id)
    is_prefixed = inputs.foreign.tokenizer.find("add_prefix_space", bool) is True
    if added or is_prefixed:
        description: dict[str, Any] = json.loads(tokenizer.content())
        description["pre_tokenizer"] |= {"add_prefix_space": is_prefixed}
        description["model"]["vocab"] |= added
        silent = inputs.special
        description["added_tokens"] += [
            {"id": token_id, "content": text, **_PLAIN, "special": text in silent} for text, token_id in added.items()
        ]
        tokenizer = JsonTokenizer(json.dumps(description).encode(), eos_id)
    return Tokenizers.shared(_with_rows(inputs, tokenizer))


def _with_rows(inputs: Inputs, tokenizer: JsonTokenizer) -> JsonTokenizer:
    """Return a tokeniser without the special tokens at its end that the model has no row for, such as BART's mask.

    No text has them. One that lacks rows for other tokens, too, is returned as it is, to be refused.
    """
    room = min(inputs.config.source_vocab_size, inputs.config.target_vocab_size)
    if tokenizer.vocab_size <= room:
        return tokenizer
    description: dict[str, Any] = json.loads(tokenizer.content())
    tokens, model = description.get("added_tokens", []), description["model"]
    beyond = {token["content"]: token["id"] for token in tokens if token["id"] >= room}
    special = {token["id"] for token in tokens if token.get("special")}
    if set(beyond.values()) != set(range(room, tokenizer.vocab_size)) or not special >= set(beyond.values()):
        return tokenizer
    description["added_tokens"] = [token for token in tokens if token["id"] < room]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][:room]
    else:
        model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token not in beyond}
    inputs.report.translated.append(f"the model has no row for {listed(list(beyond))}: left out, as no text has it")
    return JsonTokenizer(json.dumps(description, ensure_ascii=False).encode(), inputs.config.eos_id)


def _from_bytes(inputs: Inputs) -> Tokenizers:
    """Make ByT5's tokeniser, which has no file: a token is a byte."""
    if added := _text_tokens(inputs, {}):
        unsought = f"not looked for in texts unless special tokens are: {listed(list(added))}"
        inputs.report.ignored.append(f"added tokens are not written, and {unsought}")
    extra = inputs.foreign.tokenizer.find("extra_ids", int)
    return Tokenizers.shared(ByteTokenizer(inputs.config.eos_id, _BYTES_BEFORE, _BYTES_EXTRA if extra is None else extra))


def _by_piece(inputs: Inputs, model: str, vocabulary: str, ids: Mapping[str, int], silent: Collection[str]) -> Tokenizer:
    """Return the tokeniser of a SentencePiece model whose pieces have ids in a vocabulary of their own."""
    path, unknown = inputs.foreign.path, ids.get("<unk>")
    if unknown is None:
        raise ForeignError(f"{path / vocabulary}: <unk> is missing")
    try:
        content, _ = with_names_as_text(inputs.content(model))
        table, others = ids_by_piece(content, ids, unknown, silent)
        files = added_tokens(path, inputs.foreign.tokenizer.fields)
        added = {name: token_id for name, token_id in _text_tokens(inputs, ids).items() if name in files and name not in silent}
        return SentencePieceTokenizer(content, table, inputs.config.eos_id, {**_written(inputs, model, added), **others})
    except TokenizerError as error:  # one of several files
        raise ForeignError(f"{path / model}: {error}") from error


def _of_pieces(inputs: Inputs, name: str, table: Callable[[bytes], list[int]]) -> Tokenizers:
    """Return the tokeniser of a SentencePiece model with a family's table of ids, or that of a `tokenizer.json` that differs."""
    content, _ = with_names_as_text(inputs.content(name))
    ids = table(content)
    pieces = dict(zip(PieceModel(content).pieces, ids, strict=True))
    added = _text_tokens(inputs, pieces)
    if inputs.has_json and (added or any(inputs.names.get(piece, token_id) != token_id for piece, token_id in pieces.items())):
        return _preferring_json(inputs, name)
    return Tokenizers.shared(SentencePieceTokenizer(content, ids, inputs.config.eos_id, _written(inputs, name, added)))


def from_pegasus(inputs: Inputs) -> Tokenizers:
    """Read `spiece.model` of Pegasus."""
    stated = inputs.foreign.tokenizer.find("offset", int)
    offset = _PEGASUS_OFFSET if stated is None else stated
    return _of_pieces(inputs, "spiece.model", lambda model: shifted_ids(model, offset, {"<pad>": 0, "</s>": 1}))


# `spiece.model` of T5, whose ids are the model's; and of mBART or NLLB, before whose pieces fairseq has four tokens.
from_t5: Final = partial(_of_pieces, name="spiece.model", table=same_ids)
from_fairseq: Final = partial(_of_pieces, name="sentencepiece.bpe.model", table=lambda model: shifted_ids(model, 1, _FAIRSEQ))


def _preferring_json(inputs: Inputs, name: str) -> Tokenizers:
    """Read `tokenizer.json` where it has more than another file."""
    inputs.report.translated.append(f"{TOKENIZER_FILE} has tokens that {name} has not, or other ids: it is read in its place")
    return from_json(inputs)


def _written(inputs: Inputs, name: str, added: Mapping[str, int]) -> dict[int, str]:
    """Return the pieces of added tokens that a SentencePiece model has not, and report them."""
    unsought = listed(list(added))
    told = f"added tokens are written, but not looked for in texts unless special tokens are: {name} has them not: {unsought}"
    if added and told not in inputs.report.ignored:
        inputs.report.ignored.append(told)
    return {token_id: text.replace(" ", SPACE) for text, token_id in added.items()}


def _text_tokens(inputs: Inputs, known: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens that were added to a vocabulary and are text: no names, not special."""
    special, taken = inputs.special, set(known.values())
    return {
        name: token_id
        for name, token_id in inputs.names.items()
        if name not in known and token_id not in taken and name not in special and not is_name(name)
    }


def read_token_ids(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a folder's tokens by name; those of a piece of text are among them where a file names them."""
    return {**dict(_pieces(folder)), **added_tokens(folder, tokenizer)}


def added_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that were added to a vocabulary, in files of their own."""
    found = dict(_checked(folder / ADDED_FILE, load_object_if_any(folder / ADDED_FILE).items()))
    added = tokenizer.get("added_tokens_decoder")
    if isinstance(added, dict):
        found.update(_checked(folder / TOKENIZER_CONFIG, ((_content(token), _number(index)) for index, token in added.items())))
    return found


def family_tokens(codes: Sequence[str], token_ids: Mapping[str, int], folder: Path, is_fairseq: bool) -> dict[str, int]:
    """Return the ids of a family's language tokens where the files may not name them: after all pieces, in the family's order.

    With `is_fairseq`, four tokens of fairseq's replace three of the sentencepiece model.
    """
    if found := {code: token_ids[code] for code in codes if code in token_ids}:
        return found
    pieces = _sentencepieces(folder)[1] if is_fairseq else load_object_if_any(folder / VOCABULARY_FILE)
    first = len(pieces) + 1 if is_fairseq and pieces else len(pieces)
    return {code: first + index for index, code in enumerate(codes)} if first else {}


def _pieces(folder: Path) -> Iterable[tuple[str, int]]:
    """Return the pieces of the file with most ids."""
    if (path := folder / TOKENIZER_FILE).exists():
        return _json_pieces(path)
    if (path := folder / VOCABULARY_FILE).exists():
        return _checked(path, load_object(path).items())
    name, pieces = _sentencepieces(folder)
    return _FAIRSEQ.items() if name.startswith("sentencepiece.bpe") else ((piece, i) for i, piece in enumerate(pieces))


def _json_pieces(path: Path) -> Iterator[tuple[str, int]]:
    content = load_object(path)
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from _checked(path, vocabulary.items())
    elif isinstance(vocabulary, list):
        pieces = (piece[0] if isinstance(piece, list) and piece else None for piece in vocabulary)
        yield from _checked(path, ((piece, i) for i, piece in enumerate(pieces)))
    if isinstance(added, list):
        yield from _checked(path, ((_content(token), token.get("id") if isinstance(token, dict) else None) for token in added))


def _checked(path: Path, pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, int]]:
    for token, index in pairs:
        if not isinstance(token, str) or not is_whole(index) or index < 0:
            raise ForeignError(f"{path}: {token!r:.60} and {index!r:.60} are not a token and its id")
        yield token, index


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _number(index: Any) -> Any:
    return int(index) if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 10 else index


def _sentencepieces(folder: Path) -> tuple[str, list[str]]:
    """Return the name and the pieces of a folder's SentencePiece model; no pieces without one."""
    path = next((folder / name for name in _SENTENCEPIECE_FILES if (folder / name).exists()), None)
    if path is None:
        return "", []
    try:
        return path.name, PieceModel(read(path, MAX_FILE_BYTES)).pieces
    except TokenizerError as error:
        raise ForeignError(f"{path}: {error}") from error


def with_special_tokens(
    foreign: Foreign, tokenizers: Tokenizers, config: ModelConfig, around: Collection[int], is_read: bool, report: Report
) -> Tokenizers:
    """Return the tokenisers with the special tokens that a source may name: those that do not belong to a sequence's structure.

    Start and end of a sequence, padding, the unknown token, separators, languages and others that go `around` a text do.
    `is_read` says whether the others are tokens where a request does not say.
    """
    room, structure = min(config.source_vocab_size, config.target_vocab_size), _structure(foreign.path)
    taken = {config.pad_id, config.eos_id, config.decoder_start_id, *around}
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
    source, target = tokenizers.source, tokenizers.target
    if source is target and isinstance(source, SentencePieceTokenizer) and written:  # answers have their names, as elsewhere
        settings = source.settings()
        pieces = {**{int(token_id): piece for token_id, piece in settings["pieces"].items()}, **written}
        source = target = SentencePieceTokenizer(source.content(), settings["ids"], source.eos_id, pieces)
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
    is_of_bytes = isinstance(source, ByteTokenizer)
    sentinels = _sentinels(range(source.settings()["offset"] + 256, source.vocab_size)) if is_of_bytes else {}
    return sentinels | {name: {**x, "id": ids[name]} for name, x in added.items() if name in ids}


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
    """Yield each file's description of a token; a later one takes precedence."""
    for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
        stated = load_object_if_any(folder / name)
        lists = [stated.get(field) for field in ("additional_special_tokens", "extra_special_tokens")]
        for token in (stated.get("mask_token"), *(token for tokens in lists if isinstance(tokens, list) for token in tokens)):
            yield {**token, "special": True} if isinstance(token, dict) else {"content": token, "special": True}
    yield from ({"content": name} for name in load_object_if_any(folder / ADDED_FILE))
    added, decoder = load_object_if_any(folder / TOKENIZER_FILE).get("added_tokens"), stated.get("added_tokens_decoder")
    for tokens in (added, [*decoder.values()] if isinstance(decoder, dict) else None):
        yield from (token for token in (tokens if isinstance(tokens, list) else ()) if isinstance(token, dict))


def _structure(folder: Path) -> set[str]:
    """Return the names of tokens that are a sequence's structure."""
    files = (load_object_if_any(folder / name) for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG))
    tokens = [file.get(field) for file in files for field in _STRUCTURE]
    return {*_FAIRSEQ, *(str(_content(token)) for token in tokens)}
