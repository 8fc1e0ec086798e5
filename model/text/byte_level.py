"""Tokenisers of bytes: our own, which training learns, byte-level BPE on Hugging Face `tokenizers`; and bytes as tokens (ByT5).

In our own every byte is a token, so no input is unknown and decoding gives the text back exactly. There is deliberately no Unicode
normalisation: composed and decomposed forms of a character stay what they were. One space is put before the text, so that a word
is the same token at the start of a sentence as inside it; decoding takes that one space off again. Special tokens are never
recognised in text: `</s>` typed by a user is four ordinary characters.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dragoman.model.files import write_text
from dragoman.model.text.json_file import EncoderTokenizer, encoder_of, parsed
from dragoman.model.text.pieces import byte_alphabet
from dragoman.model.text.tokenizer import Pieces, Tokenizer, TokenizerError, read, reason

PAD, EOS, START = "<pad>", "</s>", "<s>"
SPECIAL_TOKENS = (PAD, EOS, START)
FILE_NAME = "tokenizer.json"
MAX_SPECIAL_TOKENS = 1 << 16


class ByteLevelTokenizer(EncoderTokenizer):
    """One vocabulary, shared by source and target."""

    kind = "byte_level"

    def __init__(self, encoder: Encoder) -> None:
        """Wrap a loaded encoder.

        Raises:
            TokenizerError: If it lacks a special token.
        """
        encoder.encode_special_tokens = True
        # A file may ask for both; a text is never cut without saying so, and never filled up to a length.
        encoder.no_truncation()
        encoder.no_padding()
        self.encoder = encoder
        ids: list[int] = []
        for token in SPECIAL_TOKENS:
            found = encoder.token_to_id(token)
            if found is None:
                raise TokenizerError(f"the tokeniser lacks {token}")
            ids.append(found)
        self.pad_id, self.eos_id, self.start_id = ids
        self.vocab_size: int = encoder.get_vocab_size()
        byte_of, token_of = byte_alphabet(), {i: token for token, i in encoder.get_vocab().items()}
        self._table = Pieces.without_first_space(
            [b"" if i in ids else bytes(byte_of[character] for character in token_of[i]) for i in range(self.vocab_size)]
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn `vocab_size` tokens (specials and all 256 bytes included) from texts; the same texts give the same tokens."""
        encoder = Encoder(models.BPE())
        encoder.normalizer = normalizers.Prepend(" ")
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        encoder.train_from_iterator(texts, trainer)
        return cls(encoder)

    def extended(self, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn more tokens, up to `vocab_size`, from the texts that these were learnt from; these keep their ids.

        Raises:
            TokenizerError: If there are not so many tokens to learn, or if what is learnt does not begin with these tokens: the
                texts are others.
        """
        if vocab_size < self.vocab_size:
            raise TokenizerError(f"there are {self.vocab_size} tokens already, {vocab_size} are fewer")
        larger = type(self).train(texts, vocab_size)
        if larger.vocab_size < vocab_size:
            raise TokenizerError(f"of these texts {larger.vocab_size} tokens can be learnt, not {vocab_size}")
        if not self.encoder.get_vocab().items() <= larger.encoder.get_vocab().items():
            raise TokenizerError("the tokens were learnt from other texts: more can be learnt from the same only")
        return larger

    def pieces_of(self, larger: "ByteLevelTokenizer") -> list[list[int]]:
        """Return the ids here of each token that `larger` has besides these."""
        tokens = (larger.encoder.id_to_token(i) for i in range(self.vocab_size, larger.vocab_size))
        return [[piece.id for piece in self.encoder.model.tokenize(token)] for token in tokens]

    @classmethod
    def load(cls, directory: Path, name: str = FILE_NAME) -> Self:
        """Read `tokenizer.json`, or the file of another name, from a directory.

        Raises:
            TokenizerError: Naming the file and what is wrong with it.
        """
        path = directory / name
        content = read(path)
        try:
            encoder = encoder_of(parsed(content))
        except TokenizerError as error:
            raise TokenizerError(f"{path}: not a byte-level tokeniser: {error}") from error
        try:
            return cls(encoder)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error
        except KeyError as error:  # a token of other characters, or an id that none has
            raise TokenizerError(f"{path}: not a byte-level tokeniser: {reason(error)} is no token of bytes") from error

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` into an existing directory."""
        write_text(directory / FILE_NAME, self.encoder.to_str(pretty=True))

    def content(self) -> bytes:
        return self.encoder.to_str(pretty=True).encode()


class ByteTokenizer(Tokenizer):
    """UTF-8, each byte a token; all other ids are silent."""

    kind = "bytes"

    def __init__(self, eos_id: int = 1, offset: int = 3, num_extra: int = 125) -> None:
        """Take the places of the bytes.

        Args:
            eos_id: The end-of-sequence token.
            offset: The id of byte 0: so many special tokens come before it.
            num_extra: Silent tokens after byte 255.

        Raises:
            TokenizerError: If a number is out of range.
        """
        if not (0 <= offset <= MAX_SPECIAL_TOKENS and 0 <= num_extra <= MAX_SPECIAL_TOKENS):
            raise TokenizerError(f"{offset} and {num_extra} special tokens; at most {MAX_SPECIAL_TOKENS} are allowed")
        self.vocab_size = offset + 256 + num_extra
        if not 0 <= eos_id < self.vocab_size or offset <= eos_id < offset + 256:
            raise TokenizerError(f"eos_id {eos_id} is not that of a special token")
        self.eos_id, self._offset, self._num_extra = eos_id, offset, num_extra
        silent = [*range(offset), *range(offset + 256, self.vocab_size)]
        table = [b""] * offset + [bytes([byte]) for byte in range(256)] + [b""] * num_extra
        self._table = Pieces(table, {}, silent)

    def encode(self, text: str) -> list[int]:
        return [byte + self._offset for byte in text.encode()]

    def settings(self) -> Mapping[str, Any]:
        return {"eos_id": self.eos_id, "offset": self._offset, "num_extra": self._num_extra}
