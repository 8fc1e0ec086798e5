"""What `dragoman score` does: pairs of lines through a client, one line for each onto a stream."""

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from dragoman.client.errors import InvalidArgument
from dragoman.client.ordered import in_order
from dragoman.client.scope import Scope
from dragoman.client.scoring import Score
from dragoman.client.sync import Client
from dragoman.model.corpus import read_lines
from dragoman.model.errors import InputError


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What to ask for, and how to print it.

    Attributes:
        model: Model to ask; may be empty where the server has exactly one.
        length_penalty: Exponent of the length in a score; None for the server's default.
        is_aligned: Print the links between words too.
        alignment_layer: Decoder layer they are taken from; None for the mean of all.
        concurrency: Calls in flight at once.
        is_json: Print each answer as a JSON object in a line, with every field of `Score`; what is not UTF-8 in a piece becomes
            U+FFFD.
    """

    model: str = ""
    length_penalty: float | None = None
    is_aligned: bool = False
    alignment_layer: int | None = None
    concurrency: int = 32
    is_json: bool = False

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(f"--concurrency: {self.concurrency} is less than 1")
        if self.alignment_layer is not None and not self.is_aligned:
            raise InputError("--alignment-layer goes with --alignment")


def score_files(client: Client, source: Path, target: Path, out: TextIO, options: ScoreOptions) -> None:
    """Write a line for each pair of lines, in order: score, log-probability and, if asked for, links, with tabs between.

    Args:
        client: Where to ask.
        source: One text a line.
        target: What each is scored with; blank lines are targets too.
        out: Where to write.
        options: What to ask for.

    Raises:
        InputError: If a file cannot be read, they have different numbers of lines, or the server refuses a pair, naming its line;
            those before it are written.
        CallError: If a call fails for any other reason.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise InputError(f"{source} has {len(sources)} lines but {target} has {len(targets)}")

    def work(pair: tuple[str, str], scope: Scope) -> Score:
        return client.score(
            *pair,
            model=options.model,
            length_penalty=options.length_penalty,
            return_word_alignment=options.is_aligned,
            alignment_layer=options.alignment_layer,
            scope=scope,
        )

    number = 1
    pairs = zip(sources, targets, strict=True)
    with client.scope() as scope, closing(in_order(pairs, work, scope, options.concurrency)) as scores:
        try:
            for score in scores:
                out.write(_line(score, options) + "\n")
                out.flush()
                number += 1
        except InvalidArgument as error:
            raise InputError(f"line {number} of {source} and {target}: {error.message}") from error


def _line(score: Score, options: ScoreOptions) -> str:
    if options.is_json:
        return json.dumps(asdict(score), ensure_ascii=False, default=lambda piece: piece.decode(errors="replace"))
    fields = [f"{score.score:.6f}", f"{score.log_prob:.6f}"]
    if score.word_alignment is not None:
        fields.append(score.word_alignment)
    return "\t".join(fields)
