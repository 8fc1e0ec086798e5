"""What a model gives: the output tensors, and what each says of an answer."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from dragoman.server.core.answers import Answer, Generated, TokenLogProb

# Of a text, or of each of its answers.
Subject: TypeAlias = Literal["text", "answer"]


class Output(NamedTuple):
    """An output.

    Attributes:
        name: As requests name it.
        datatype: Of its elements.
        subject: What each element speaks of.
        value: Says it of an answer.
    """

    name: str
    datatype: str
    subject: Subject
    value: Callable[[Generated, Answer], Any]


TEXT, TOKENS, LOG_PROBS, SEED, WARNINGS = "text_output", "tokens", "log_probs", "seed", "warnings"
OUTPUTS = {
    output.name: output
    for output in (
        Output(TEXT, "BYTES", "answer", lambda _, answer: answer.text.encode()),
        Output("score", "FP64", "answer", lambda _, answer: answer.score),
        Output("finish_reason", "BYTES", "answer", lambda _, answer: answer.finish_reason.encode()),
        Output(TOKENS, "BYTES", "answer", lambda _, answer: msgspec.json.encode(list(answer.tokens))),
        Output(LOG_PROBS, "BYTES", "answer", lambda _, answer: msgspec.json.encode([told(token) for token in answer.log_probs])),
        Output("num_input_tokens", "UINT32", "text", lambda generated, _: generated.source_tokens),
        Output("num_output_tokens", "UINT32", "text", lambda generated, _: generated.generated_tokens),
        Output("is_truncated", "BOOL", "text", lambda generated, _: generated.is_truncated),
        Output(SEED, "UINT64", "text", lambda generated, _: generated.seed or 0),
        Output(WARNINGS, "BYTES", "text", lambda generated, _: "\n".join(generated.warnings).encode()),
    )
}


def told(token: TokenLogProb) -> dict[str, Any]:
    """Return what is told of a token, for JSON; a piece that is part of a character is U+FFFD there."""
    number, piece, log_prob, top = token
    said = {"token": number, "piece": piece.decode(errors="replace"), "log_prob": log_prob}
    return said | {"top": [told(other) for other in top]} if top else said
