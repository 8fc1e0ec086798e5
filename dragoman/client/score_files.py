"""`dragoman score`: scores of pairs of lines, one line each."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from dragoman.client.calls import Scope
from dragoman.client.lines import in_order, json_line, naming_refused
from dragoman.client.results import Score
from dragoman.client.sync import Client
from dragoman.model.corpus import read_lines
from dragoman.model.errors import InputError


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options of the requests and of the output.

    With `is_json` each score is a line of JSON with every field of `Score`; bytes that are not UTF-8 become U+FFFD, and of a blank
    pair all but the tokens are null.
    """

    model: str = ""
    length_penalty: float | None = None
    return_word_alignment: bool = False
    alignment_layer: int | None = None
    concurrency: int = 32
    is_json: bool = False
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""

    def __post_init__(self) -> None:
        if self.alignment_layer is not None and not self.return_word_alignment:
            raise InputError("--alignment-layer goes with --alignment")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `Client.score`, beside the texts."""
        return {name: value for name, value in asdict(self).items() if name not in ("concurrency", "is_json")}


class Pairs:
    """Pairs of lines of two files, gunzipped where a name ends in .gz; a blank target beside a text is the empty target.

    Raises:
        InputError: If a file cannot be read, the files have different numbers of lines, or only the source's line is blank.
    """

    def __init__(self, source: Path, target: Path) -> None:
        sources, targets = read_lines(source), read_lines(target)
        if len(sources) != len(targets):
            raise InputError(f"{source} has {len(sources)} lines but {target} has {len(targets)}")
        self.names = f"{source} and {target}"
        self.lines = list(zip(sources, targets, strict=True))
        for number, (text, translation) in enumerate(self.lines, start=1):
            if not text.strip() and translation.strip():
                raise InputError(f"{source}, line {number}: the line is blank, but that of {target} is not")


def score_pairs(client: Client, pairs: Pairs, out: TextIO, options: ScoreOptions) -> None:
    """Write a line for each pair of lines, in order: score, log-probability and, if asked for, links, with tabs between.

    Two blank lines have a blank line, without asking the server.

    Raises:
        InputError: If the server refuses a pair, naming its line, or an option; the pairs before it are written.
        CallError: If a call fails for any other reason.
    """
    with closing(_scores(client, pairs.lines, pairs.names, options, skips_blank=True)) as scores:
        for score in scores:
            out.write(_line(score, options))
            out.flush()


def token_log_probs(
    client: Client, sources: list[str], targets: list[str], names: str, options: ScoreOptions
) -> Iterator[list[float]]:
    """Yield the log-probability of every token of each target after its source, in order; raises as `score_pairs`."""
    pairs = list(zip(sources, targets, strict=True))
    with closing(_scores(client, pairs, names, options, skips_blank=False)) as scores:
        for score in scores:
            assert score is not None, "none is skipped"
            yield [token.log_prob for token in score.tokens]


def _scores(
    client: Client, pairs: list[tuple[str, str]], names: str, options: ScoreOptions, *, skips_blank: bool
) -> Generator[Score | None, None, None]:
    """Return the score of each pair, in order; None for a skipped blank one. Raises as `score_pairs`."""

    def work(pair: tuple[str, str], scope: Scope) -> Score | None:
        if skips_blank and not pair[0].strip():
            return None
        return client.score(*pair, **options.arguments, scope=scope)

    scores = in_order(pairs, work, client.scope(), options.concurrency)
    return naming_refused(scores, lambda number: f"line {number} of {names}")


def _line(score: Score | None, options: ScoreOptions) -> str:
    """Return the line for a pair, None for a blank one."""
    if options.is_json:
        return json_line(score, Score, tokens=[])
    if score is None:
        return "\n"
    columns = [f"{score.score:.6f}", f"{score.log_prob:.6f}"]
    if score.word_alignment is not None:
        columns.append(score.word_alignment)
    return "\t".join(columns) + "\n"
