"""Files of Hugging Face `tokenizers`: normaliser, pre-tokeniser, model and decoder in one JSON; and byte-level BPE from two files.

Ids are that library's; its treatment of special tokens is not taken over: their names in a text stay text, whether the file says
that a token is special or only adds it, and even where a Unigram model has the name among its pieces. For that, such names are
replaced, in memory, by ones that nobody can type; `reading` leaves those that a text may name. An answer has the names of tokens
that are added and not special, as there.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from tokenizers import Tokenizer as Encoder

from dragoman.model.text.pieces import pieces_of
from dragoman.model.text.tokenizer import MAX_ID, UNKNOWN_MARK, Encode, SpecialToken, Tokenizer, TokenizerError, is_name, reason


class EncoderTokenizer(Tokenizer):
    """A tokeniser whose texts the library `tokenizers` encodes."""

    encoder: Encoder

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encoder.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores."""
        return [encoding.ids for encoding in self.encoder.encode_batch_fast(list(texts), add_special_tokens=False)]


class JsonTokenizer(EncoderTokenizer):
    """A `tokenizer.json`."""

    kind = "tokenizers"

    def __init__(self, content: bytes, eos_id: int) -> None:
        """Load a file.

        Args:
            content: Of the file.
            eos_id: The end-of-sequence token.

        Raises:
            TokenizerError: If the file is damaged, or if its decoder is one whose text is not that of its tokens one after another.
        """
        self._content, self.eos_id = content, eos_id
        description = _with_added_tokens(parsed(content))
        self._unknown_id = _unknown_id(description["model"])
        tokens = _hide_names(description)
        self._table = pieces_of(description.get("decoder"), tokens)
        self.vocab_size = len(tokens)
        if not 0 <= eos_id < self.vocab_size:
            raise TokenizerError(f"eos_id {eos_id} is not in 0 to {self.vocab_size - 1}")
        self.encoder = encoder_of(description)
        self.encoder.encode_special_tokens = True
        for entry in description["added_tokens"]:
            if self.encoder.token_to_id(entry["content"]) != entry["id"]:
                raise TokenizerError(f"added_tokens gives an id, {entry['id']}, that it does not have")

    @classmethod
    def from_byte_pairs(cls, vocabulary: bytes, merges: bytes, special_tokens: Sequence[str], eos_id: int) -> Self:
        """Make one of byte-level BPE in two files, as BART has it: no space is put before a text.

        Args:
            vocabulary: Content of `vocab.json`.
            merges: Content of `merges.txt`.
            special_tokens: Names of those that are silent and stay text where they are typed.
            eos_id: The end-of-sequence token.

        Raises:
            TokenizerError: If a file is damaged.
        """
        try:
            ids = json.loads(vocabulary)
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"vocab.json: not JSON: {reason(error)}") from error
        if not isinstance(ids, dict):
            raise TokenizerError("vocab.json: not an object of ids by token")
        try:
            lines = merges.decode().splitlines()
        except UnicodeDecodeError as error:
            raise TokenizerError("merges.txt: not UTF-8") from error
        pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        added = [{"id": ids[name], "content": name, "special": True, **_PLAIN} for name in special_tokens if name in ids]
        model = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": ids, "merges": pairs}
        return cls(json.dumps({"version": "1.0", "added_tokens": added, **_BYTE_LEVEL, "model": model}).encode(), eos_id)

    def reading(self, tokens: Sequence[SpecialToken]) -> Encode:
        """Return an encoder of texts with these tokens, which are found as the library finds them; loads the file again."""
        description = _with_added_tokens(parsed(self._content))
        _hide_names(description, {token.content: token for token in tokens})
        encoder = encoder_of(description)

        def encode(text: str) -> list[int]:
            ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
            return ids

        return encode

    def word_bytes(self, token_id: int) -> bytes:
        return UNKNOWN_MARK if token_id == self._unknown_id else self.token_bytes(token_id)

    def content(self) -> bytes:
        return self._content

    def settings(self) -> Mapping[str, Any]:
        return {"eos_id": self.eos_id}


def parsed(content: bytes) -> dict[str, Any]:
    """Return a file as JSON.

    Raises:
        TokenizerError: If it has no model with a vocabulary.
    """
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"not JSON: {reason(error)}") from error
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError("not a file of `tokenizers`: it has no model with a vocabulary")
    assert isinstance(description, dict)
    return description


def encoder_of(description: dict[str, Any]) -> Encoder:
    """Return the encoder of a file of the library `tokenizers`, whose native code gives up in several ways; here, in one.

    Raises:
        TokenizerError: If it cannot be loaded.
    """
    _refuse_torn_merges(description["model"])
    try:
        return Encoder.from_str(json.dumps(description))
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library raises bare Exception for every kind of bad file, and where its native code gives up something beside it.
    except BaseException as error:
        raise TokenizerError(f"not a file of `tokenizers`: {reason(error)}") from error


def _refuse_torn_merges(model: dict[str, Any]) -> None:
    """Refuse merges whose right sides lack the prefix that pieces within a word have.

    The library cuts off as many bytes as the prefix has, whatever they are; inside a character, that ends the process.
    """
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    rights = (merge[-1] if isinstance(merge, list) and merge else merge for merge in merges)
    if not all(isinstance(right, str) and right.rpartition(" ")[2].startswith(prefix) for right in rights):
        raise TokenizerError(f"a merge lacks continuing_subword_prefix {ascii(prefix)[:40]}")


def ids_around(content: bytes) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor of a file puts before every text, and those that it puts after.

    Raises:
        TokenizerError: If the file is damaged, or the library knows no character of a short text.
    """
    description = parsed(content)
    _unknown_id(description["model"])
    encoding = encoder_of({**description, "truncation": None, "padding": None}).encode(_ANY_TEXT)
    mask: list[int] = encoding.special_tokens_mask
    if 0 not in mask:
        raise TokenizerError(f"none of {_ANY_TEXT!r} has a token")
    return encoding.ids[: mask.index(0)], encoding.ids[len(mask) - mask[::-1].index(0) :]


_ANY_TEXT = "a 1 я 我"
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTE_LEVEL = {
    "truncation": None,
    "padding": None,
    "normalizer": None,
    "pre_tokenizer": _LEVEL,
    "post_processor": None,
    "decoder": _LEVEL,
}


def _with_added_tokens(description: dict[str, Any]) -> dict[str, Any]:
    """Return the file with its list of added tokens, which may be empty."""
    added = description.get("added_tokens", [])
    if not isinstance(added, list):
        raise TokenizerError("added_tokens is not a list")
    for entry in added:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not isinstance(entry.get("id"), int):
            raise TokenizerError("added_tokens has an entry that is not a token with an id")
    return {**description, "added_tokens": added}


def _hide_names(description: dict[str, Any], shown: Mapping[str, SpecialToken] = MappingProxyType({})) -> list[str | None]:
    """Rename tokens that are names, but for the shown, in place; return the text of every id, None for special ones."""
    added, model = description["added_tokens"], description["model"]
    names = [entry for entry in added if entry["content"] not in shown]
    hidden = {entry["content"]: entry["id"] for entry in names if entry.get("special") or is_name(entry["content"])}
    tokens = _tokens(model["vocab"], {entry["id"]: entry["content"] for entry in added})
    for entry in added:
        if entry.get("special"):
            tokens[entry["id"]] = None
    # No pre-tokeniser leaves a space in a word that is looked up; and who would guess the rest?
    secret = {name: f" {secrets.token_hex(16)} {token_id}" for name, token_id in hidden.items()}
    # They stay in the list, as the library counts ids on by it.
    description["added_tokens"] = [
        {**entry, **_PLAIN, "content": secret[entry["content"]], "special": True} if entry["content"] in secret else entry
        for entry in added
    ]
    for entry in description["added_tokens"]:
        if token := shown.get(entry["content"]):
            entry.update(lstrip=token.lstrip, rstrip=token.rstrip)
    # They say which special tokens are put around a text, to what length it is cut or filled up: none of that is done.
    description.update(post_processor=None, truncation=None, padding=None)
    if isinstance(model["vocab"], list):
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {secret.get(token, token): token_id for token, token_id in model["vocab"].items()}
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = secret.get(unknown, unknown)
    if "dropout" in model:
        model["dropout"] = None  # of training: a text would have other ids each time
    if isinstance(merges := model.get("merges"), list):
        model["merges"] = [merge for merge in merges if _merged(merge) not in secret]
    return tokens


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """Return the unknown token, which BPE may do without; Unigram names its place, other models the token."""
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    found = model.get("unk_id") if isinstance(vocabulary, list) else vocabulary.get(str(unknown))
    if isinstance(found, int):
        return found
    if isinstance(vocabulary, list) or unknown is not None or model.get("type") in ("WordLevel", "WordPiece"):
        raise TokenizerError("the model has no token for what is unknown, so that some texts have no ids")
    return None


def _merged(merge: Any) -> str:
    """Return the token that two make: `["a", "b"]`, or `"a b"` in older files."""
    return "".join(map(str, merge)) if isinstance(merge, list) else str(merge).replace(" ", "", 1)


def _tokens(vocabulary: dict[Any, Any] | list[Any], added: Mapping[int, str]) -> list[str | None]:
    """Return the text of every id."""
    if isinstance(vocabulary, list):
        if not all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in vocabulary):
            raise TokenizerError("the vocabulary has an entry that is not a piece with its score")
        texts: dict[int, str] = {i: piece for i, (piece, _) in enumerate(vocabulary)}
    elif all(isinstance(token_id, int) for token_id in vocabulary.values()):
        texts = {token_id: token for token, token_id in vocabulary.items()}
    else:
        raise TokenizerError("the vocabulary has an id that is not a number")
    texts |= added
    if not texts or not all(0 <= token_id <= MAX_ID for token_id in texts):
        raise TokenizerError(f"the vocabulary is empty or has an id that is not in 0 to {MAX_ID}")
    return [texts.get(token_id) for token_id in range(max(texts) + 1)]
