"""What both forms of the Open Inference Protocol say, over gRPC and over HTTP: outputs by name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.system.harness.protocol import Answer, LogProb

# Those of a text; the others are of its answers.
OF_TEXTS = ("num_input_tokens", "num_output_tokens", "is_truncated", "seed")


def log_prob(told: Mapping[str, Any]) -> LogProb:
    return told["token"], told["piece"], told["log_prob"], tuple(map(log_prob, told.get("top", ())))


def rows_of(outputs: Mapping[str, Sequence[Any]], num_texts: int) -> list[Answer]:
    """Return what outputs say of each text; elements are row by row."""

    def of(name: str, number: int) -> list[Any]:
        values = outputs[name]
        width = len(values) // num_texts
        return list(values[number * width : (number + 1) * width])

    return [
        Answer(
            texts=of("text_output", number),
            scores=of("score", number),
            tokens=[json.loads(each) for each in of("tokens", number)],
            endings=of("finish_reason", number),
            log_probs=[list(map(log_prob, json.loads(each))) for each in of("log_probs", number)]
            if "log_probs" in outputs
            else None,
            counts=(of("num_input_tokens", number)[0], of("num_output_tokens", number)[0]),
            is_truncated=of("is_truncated", number)[0],
            seed=of("seed", number)[0] if "seed" in outputs else None,
        )
        for number in range(num_texts)
    ]


def project(answer: Answer) -> Answer:
    """Return what of a whole answer is carried: pieces as texts, and no list where no log-probabilities were asked for."""
    if answer.log_probs is None or not any(answer.log_probs):
        return replace(answer, log_probs=None)
    return replace(answer, log_probs=[list(map(_as_text, each)) for each in answer.log_probs])


def _as_text(told: LogProb) -> LogProb:
    token, piece, value, top = told
    assert isinstance(piece, bytes)
    return token, piece.decode(errors="replace"), value, tuple(map(_as_text, top))
