"""Bytes of answers on the wire, before there are any: what a `ModelInferResponse` takes at the most."""

from dataclasses import dataclass

from dragoman.server.core.answer_size import AnswerShape, ScoresShape

# Names, datatypes and shapes of all outputs, ids, and a model's name and version.
ENVELOPE_BYTES = 2048
# Of an answer: its score, its end, lengths, and what is said of its text.
ANSWER_BYTES = 128
# Of a token in JSON: names, quotes, digits of its log-probability.
TOLD_BYTES = 96
# A byte of a piece may be six characters in JSON.
ESCAPED_BYTES = 6


@dataclass(frozen=True, slots=True)
class ResponseLimit:
    """What a message can carry that answers several texts alike.

    Attributes:
        max_bytes: Of a message.
        num_texts: That it answers.
        name: Of the setting that says how large a message may be.
    """

    max_bytes: int
    num_texts: int = 1
    name: str = "max_message_bytes"

    def answer_bytes(self, shape: AnswerShape) -> int:
        """Return the bytes of the answers to all texts at the most."""
        digits = len(str(shape.max_token)) + 1
        top = shape.num_top * (TOLD_BYTES + digits) + ESCAPED_BYTES * shape.top_piece_bytes
        told = shape.num_told * (TOLD_BYTES + digits + ESCAPED_BYTES * shape.piece_bytes + top)
        answer = ANSWER_BYTES + shape.text_bytes + shape.num_tokens * digits + told
        return ENVELOPE_BYTES + self.num_texts * shape.num_answers * answer

    def scores_bytes(self, shape: ScoresShape) -> int:
        """Refuse: the protocol does not score."""
        raise NotImplementedError
