"""Bytes of answers on the wire, before there are any: what the messages of `dragoman.v1` take at the most."""

from dataclasses import dataclass

from dragoman.server.core.answer_size import AnswerShape, ScoresShape

# What a message that carries an answer has around it: two ids, a model's name and version, counts and times.
ENVELOPE_BYTES = 1024
# A tag of one byte and a number of 32 or 64 bits.
FLOAT_BYTES, DOUBLE_BYTES = 5, 9
# `i-j` and the space before it, with numbers of six digits.
LINK_BYTES = 14


@dataclass(frozen=True, slots=True)
class MessageLimit:
    """What gRPC can send.

    Attributes:
        max_bytes: Of a message.
        name: Of the setting that says so.
    """

    max_bytes: int
    name: str = "max_message_bytes"

    def answer_bytes(self, shape: AnswerShape) -> int:
        """Return the bytes of a `GenerateResponse` at the most, and of what it travels in."""
        plain = _field(shape.text_bytes) + _field(shape.num_tokens * _varint(shape.max_token))
        largest = _told(shape.piece_bytes, shape.max_token)
        tops = shape.num_top * (_field(largest) - shape.piece_bytes) + shape.top_piece_bytes
        told = _field(largest + tops) if shape.num_told else 0
        answer = _field(plain + DOUBLE_BYTES + 2 + shape.num_told * told)  # 2: why it ended
        return ENVELOPE_BYTES + plain + shape.num_answers * answer

    def scores_bytes(self, shape: ScoresShape) -> int:
        """Return the bytes of a `ScoreResponse` at the most."""
        told = shape.num_target * _field(_told(0, shape.max_token)) + 3 * shape.num_target + shape.target_bytes
        links = shape.num_links * LINK_BYTES
        weights = _field(4 * shape.num_target * shape.num_source)
        return ENVELOPE_BYTES + told + links + _field(weights + shape.source_bytes + shape.num_source * _field(0) * 2 + 16)


def _told(piece_bytes: int, max_token: int) -> int:
    """Bytes within a `TokenLogProb`, its `top` not counted."""
    return 1 + _varint(max_token) + _field(piece_bytes) + FLOAT_BYTES


def _field(num_bytes: int) -> int:
    """Bytes of a field that holds so many: its tag and its length are before them."""
    return 1 + _varint(num_bytes) + num_bytes


def _varint(number: int) -> int:
    """Bytes of a number on the wire."""
    return max(1, (number.bit_length() + 6) // 7)
