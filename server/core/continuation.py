"""What follows a text that is there already: its tokens, and the text of tokens, so that both together are one text.

A tokeniser may put a space before a text and take one off again. What continues a text has neither done to it: a space at the seam
is the continuation's own, as in "The dog" and " runs".
"""

from collections.abc import Sequence

from dragoman.model.text.tokenizer import Detokenizer, Tokenizer

GUARDS = ("a", ".", "0", "\n")
"""Texts to encode a continuation after, of which one at least has no token in common with it."""


def encode_after(tokenizer: Tokenizer, before: Sequence[int], text: str) -> list[int]:
    """Return the ids of a text that follows others, as it would be encoded in the middle of a text.

    Args:
        tokenizer: Of both.
        before: Ids that it follows; where they have no text, it is encoded as one that stands alone.
        text: It.
    """
    if text and tokenizer.decode(before):
        for guard in GUARDS:
            first, whole = tokenizer.encode(guard), tokenizer.encode(guard + text)
            if whole[: len(first)] == first:
                return whole[len(first) :]
    return tokenizer.encode(text)


def detokenizer_after(tokenizer: Tokenizer, before: Sequence[int]) -> Detokenizer:
    """Return what gives the text of ids that follow others."""
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(before)
    return detokenizer


def decode_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids that follow others."""
    detokenizer = detokenizer_after(tokenizer, before)
    return detokenizer.push(ids) + detokenizer.finish()
