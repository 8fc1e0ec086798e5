"""What a caller of Score asks for and gets: plain, frozen data, and its conversion to and from the wire."""

import uuid
from dataclasses import dataclass

from dragoman.client.errors import InternalError
from dragoman.client.request import check_text, fill
from dragoman.client.results import TokenLogProb
from dragoman.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Alignment:
    """The encoder-decoder attention, averaged over heads.

    Attributes:
        source_pieces: Texts of the source's tokens in UTF-8, end-of-sequence included; the target's are in `Score.tokens`.
        weights: A row for each target token with a weight for each source token; each row sums to 1.
    """

    source_pieces: tuple[bytes, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a target.

    Attributes:
        log_prob: Sum of the target tokens' log-probabilities, end-of-sequence included.
        score: The same divided by their number to the power `length_penalty`.
        tokens: The target's tokens, end-of-sequence included.
        alignment: If it was asked for, else None.
        word_alignment: If it was asked for, links `i-j` of source word i and target word j, with spaces between; else None.
        source_tokens: Tokens of the source, end-of-sequence included.
        model: The model that scored.
        model_version: Version of its bundle.
        request_id: The request's id, as in the server's log.
    """

    log_prob: float
    score: float
    tokens: tuple[TokenLogProb, ...]
    alignment: Alignment | None
    word_alignment: str | None
    source_tokens: int
    model: str
    model_version: str
    request_id: str


def score_request(
    text: str,
    target: str,
    *,
    model: str,
    model_version: str,
    source_language: str,
    target_language: str,
    length_penalty: float | None,
    return_alignment: bool,
    return_word_alignment: bool,
    alignment_layer: int | None,
    special_tokens_in_text: bool | None,
    priority: int,
    request_id: str | None,
) -> generation_pb2.ScoreRequest:
    """Build a request; without an id it gets one here, so that all attempts share it and errors can name it.

    Raises:
        InvalidArgument: If a value cannot be written at all, naming the field.
        TypeError: If one of the two is no string.
    """
    for name, value in (("text", text), ("target", target)):
        check_text(name, value, "; call score once for each pair")
    request_id = request_id or uuid.uuid4().hex
    fields: dict[str, object] = {
        "model": model,
        "model_version": model_version,
        "source_language": source_language,
        "target_language": target_language,
        "text": text,
        "target": target,
        "request_id": request_id,
        "priority": priority,
        "return_alignment": return_alignment,
        "return_word_alignment": return_word_alignment,
        "length_penalty": length_penalty,
        "alignment_layer": alignment_layer,
        "special_tokens_in_text": special_tokens_in_text,
    }
    return fill(generation_pb2.ScoreRequest(), fields, request_id)


def score_from_proto(message: generation_pb2.ScoreResponse, request: generation_pb2.ScoreRequest) -> Score:
    """Convert an answer.

    Args:
        message: The answer.
        request: What was asked.

    Raises:
        InternalError: If the alignment is not of the size it says.
    """
    return Score(
        log_prob=message.log_prob,
        score=message.score,
        tokens=tuple(TokenLogProb(token.token, token.piece, token.log_prob) for token in message.tokens),
        alignment=_alignment_from_proto(message) if request.return_alignment else None,
        word_alignment=message.word_alignment if request.return_word_alignment else None,
        source_tokens=message.usage.source_tokens,
        model=message.model,
        model_version=message.model_version,
        request_id=message.request_id,
    )


def _alignment_from_proto(message: generation_pb2.ScoreResponse) -> Alignment:
    alignment = message.alignment
    rows, columns = alignment.num_target_tokens, alignment.num_source_tokens
    if len(alignment.weights) != rows * columns:
        problem = f"the answer's alignment has {len(alignment.weights)} weights for {rows} target and {columns} source tokens"
        raise InternalError(problem, message.request_id)
    weights = list(alignment.weights)
    return Alignment(
        tuple(alignment.source_pieces), tuple(tuple(weights[row * columns : (row + 1) * columns]) for row in range(rows))
    )
