"""Upper bounds of answer sizes in answers, tokens and bytes of text; each protocol adapter has its own limit in message bytes."""

from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate
from typing import Protocol

from msgspec import Struct

from dragoman.model.text.tokenizer import Tokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine import messages
from dragoman.server.errors import InvalidRequest

# More than a position's likeliest tokens can be.
MAX_COUNTED = 64


class AnswerShape(Struct, frozen=True):
    """Upper bounds of an answer; `num_tokens` include the forced prefix, text and pieces are in UTF-8 bytes.

    `num_told` tokens have log-probabilities and `num_top` likeliest tokens each, which are all different (`top_piece_bytes`).
    """

    num_answers: int
    num_tokens: int
    text_bytes: int
    max_token: int
    num_told: int = 0
    piece_bytes: int = 0
    num_top: int = 0
    top_piece_bytes: int = 0


class ScoresShape(Struct, frozen=True):
    """Upper bounds of scores with alignment weights; `num_links` counts links between words."""

    num_source: int
    num_target: int
    source_bytes: int
    target_bytes: int
    max_token: int
    num_links: int


class AnswerLimit(Protocol):
    """Answer size limit of a protocol adapter."""

    @property
    def max_bytes(self) -> int:
        """Largest answer in bytes."""
        ...

    @property
    def name(self) -> str:
        """Name of the limiting setting."""
        ...

    def answer_bytes(self, shape: AnswerShape) -> int:
        """Return the most bytes of an answer of this shape."""
        ...

    def scores_bytes(self, shape: ScoresShape) -> int:
        """Return the most bytes of scores of this shape."""
        ...


class TokenSizes(Struct, frozen=True):
    """Byte sizes of a tokeniser's tokens.

    `longest_text` is the most that one token can add (a partial character may become U+FFFD), `together` the cumulative bytes of
    the longest 0, 1, 2, … tokens.
    """

    longest_text: int
    together: Sequence[int]

    @classmethod
    def measured(cls, tokenizer: Tokenizer) -> "TokenSizes":
        """Return the sizes for a tokeniser; takes 0.1 s for a large vocabulary."""
        pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        texts = (len(piece) if piece.isascii() else len(piece.decode(errors="replace").encode()) for piece in pieces)
        longest = nlargest(MAX_COUNTED, map(len, pieces))
        return cls(max(texts), (0, *accumulate(longest)))

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return self.together[1]

    def longest_together(self, count: int) -> int:
        """Return the most bytes that `count` different tokens can have."""
        return (
            self.together[count]
            if count < len(self.together)
            else self.together[-1] + (count + 1 - len(self.together)) * self.longest
        )


def check_answer(
    search: messages.SearchOptions, max_new_tokens: int, has_log_probs: bool, sizes: TokenSizes, vocabulary: int, limit: AnswerLimit
) -> None:
    """Check that the largest possible answer can be sent; raise `InvalidRequest`, naming the fields and the limit.

    Not for single answers without details, so that a server with a low limit still serves short ones.
    """
    num_tokens = len(search.forced_prefix) + max_new_tokens
    num_told, num_top = (max_new_tokens, search.num_top_log_probs) if has_log_probs else (0, 0)
    shape = AnswerShape(
        num_answers=search.num_answers,
        num_tokens=num_tokens,
        text_bytes=num_tokens * sizes.longest_text,
        max_token=max(0, vocabulary - 1),
        num_told=num_told,
        piece_bytes=sizes.longest,
        num_top=num_top,
        top_piece_bytes=sizes.longest_together(num_top),
    )
    size = limit.answer_bytes(shape)
    if size <= limit.max_bytes:
        return
    asked = f"num_return_sequences of {search.num_answers} and max_new_tokens of {max_new_tokens}"
    if num_top:
        field, asked = "top_log_probs", f"{num_top} with {asked}"
    elif has_log_probs:
        field, asked = "return_log_probs", f"with {asked}"
    else:
        field, asked = "num_return_sequences", f"{search.num_answers} with max_new_tokens of {max_new_tokens}"
    raise InvalidRequest(field, f"{asked} may take {size} bytes; {limit.name} of the server is {limit.max_bytes}")


def check_scores(request: messages.ScoreRequest, tokenizers: Tokenizers, vocabulary: int, limit: AnswerLimit) -> None:
    """Check that scores with alignment weights can be sent; raise `InvalidRequest`, naming the limit."""
    num_source, num_target = len(request.source_ids), len(request.target_ids)
    shape = ScoresShape(
        num_source=num_source,
        num_target=num_target,
        source_bytes=sum(map(len, map(tokenizers.source.token_bytes, request.source_ids))),
        target_bytes=sum(map(len, map(tokenizers.target.token_bytes, request.target_ids))),
        max_token=max(0, vocabulary - 1),
        num_links=num_target,
    )
    size = limit.scores_bytes(shape)
    if size > limit.max_bytes:
        asked = f"the scores of {num_target} target and {num_source} source tokens may take {size} bytes"
        raise InvalidRequest("return_alignment", f"{asked}; {limit.name} of the server is {limit.max_bytes}")
