"""What others notice of a long prompt: their time between two tokens while it is read, beside the time without it.

    python -m benchmarks.prompts [--checkpoint model/pretrained/en-captions] [--tokens 2000] [--rows 32] [--rounds 5] [--threads 1]

A language model's engine in this process decodes many rows at once, which never end by themselves; in every other round somebody
comes with a long prompt, which is read in pieces between their steps. A gap is the time from the end of one iteration to the end of
the next, in which every row gets a token. Pieces of other sizes than the engine's own are tried, too, the whole prompt in one among
them. Answers and their log-probabilities are compared to the last bit, those of the rows and that of the prompt.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.models import endless_bundle
from benchmarks.harness.report import environment, write
from dragoman.export.bundle import Bundle
from dragoman.server.engine.engine import Engine
from dragoman.server.engine.loading import PROMPT_PART, load_engine
from dragoman.server.engine.messages import Finished, Request
from dragoman.server.engine.scheduler import Limits

ROOT = Path(__file__).parents[1]
CACHE = Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles"
ORIGIN = b"bench"
ANSWER_TOKENS = 160
PROMPT_ANSWER_TOKENS = 16
BEFORE = 20
"""Steps of the rows before the long prompt comes."""


@dataclass(frozen=True, slots=True)
class Round:
    """One run of all rows to their ends.

    Attributes:
        gaps: Seconds between the ends of iterations, from the one in which the prompt comes, or would, for as many as it took.
        digest: Of all rows' answers and log-probabilities.
        prompt_digest: Of the prompt's.
        num_iterations: In which the prompt was read.
    """

    gaps: list[float]
    digest: str
    prompt_digest: str
    num_iterations: int


def run(engine: Engine, rows: Sequence[list[int]], prompt: list[int] | None, first: int) -> Round:
    """Decode the rows to their ends; in the middle of it the prompt comes, if there is one.

    Args:
        engine: Empty.
        rows: Their prompts.
        prompt: The long one.
        first: The token that each is fed first.
    """
    now = time.monotonic()
    for number, source in enumerate(rows):
        engine.submit(ORIGIN, Request(number, source, ANSWER_TOKENS, now, decoder_start_id=first))
    finished: dict[int, Finished] = {}
    gaps: list[float] = []
    num_iterations, read_at = 0, None
    last = time.perf_counter()
    for step in range(100_000):
        if step == BEFORE and prompt is not None:
            request = Request(len(rows), prompt, PROMPT_ANSWER_TOKENS, time.monotonic(), decoder_start_id=first)
            engine.submit(ORIGIN, request)
        engine.step()
        ended = time.perf_counter()
        reports = engine.take_reports()
        is_reading = any(prefill.num_tokens for report in reports.values() for prefill in report.statistics.prefills)
        num_iterations += step >= BEFORE and is_reading
        read_at = step if is_reading else read_at
        if step > BEFORE or (step == BEFORE and prompt is not None):
            gaps.append(ended - last)
        last = ended
        finished |= {end.id: end for report in reports.values() for end in report.finished}
        if not engine.has_work:
            break
    ends = [finished.pop(number) for number in range(len(rows))]
    return Round(gaps, _digest(ends), _digest(list(finished.values())), num_iterations)


def _digest(ends: Sequence[Finished]) -> str:
    """Return what tells answers and log-probabilities apart by their last bit."""
    content = [
        (end.reason, answer.token_ids, np.array(answer.log_probs, np.float32).tobytes()) for end in ends for answer in end.answers
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def measure(bundle: Bundle, arguments: argparse.Namespace, piece: int) -> tuple[list[Round], list[Round]]:
    """Return rounds without the prompt and with it, in turns, by an engine that reads so many tokens between two steps."""
    limits = Limits(arguments.rows + 1, 4096, 2**22, piece * PROMPT_PART, 0)
    engine = load_engine(bundle, limits, arguments.threads, is_warmed_up=True)
    random = np.random.default_rng(1)
    vocabulary = bundle.manifest.target_vocab_size
    start = bundle.manifest.decoder_start_id

    def prompt(length: int) -> list[int]:
        return [start, *random.integers(3, vocabulary, length - 1).tolist()]

    rows, long = [prompt(12) for _ in range(arguments.rows)], prompt(arguments.tokens)
    first = int(random.integers(3, vocabulary))
    run(engine, rows, long, first)  # takes the memory that there will be
    without, beside = [], []
    for _ in range(arguments.rounds):
        without.append(run(engine, rows, None, first))
        beside.append(run(engine, rows, long, first))
    return without, beside


def percentile(rounds: Sequence[Round], share: float, while_read: bool) -> float:
    """Return the median over rounds of a percentile of their gaps, in milliseconds; of those alone in which the prompt was read."""
    gaps = [each.gaps[: each.num_iterations] if while_read else each.gaps for each in rounds]
    return 1000 * statistics.median(float(np.quantile(each, share)) for each in gaps if each)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "model/pretrained/en-captions")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-bench", help="Where the bundle made of it is kept."
    )
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pieces", type=int, nargs="+", default=[32, 64, 128, 256, 512, 4096])
    arguments = parser.parse_args()
    bundle = Bundle.open(endless_bundle(arguments.checkpoint, arguments.cache))
    rows: list[dict[str, Any]] = []
    digests: set[str] = set()
    prompt_digests: set[str] = set()
    for piece in arguments.pieces:
        without, beside = measure(bundle, arguments, piece)
        digests |= {each.digest for each in (*without, *beside)}
        prompt_digests |= {each.prompt_digest for each in beside}
        read_after = [sum(each.gaps[: each.num_iterations]) for each in beside]
        rows.append(
            {
                "tokens a piece": f"{min(piece, arguments.tokens)}",
                "iterations": beside[0].num_iterations,
                "p50 without, ms": f"{percentile(without, 0.5, False):.2f}",
                "p99 without, ms": f"{percentile(without, 0.99, False):.2f}",
                "p99 beside the prompt, ms": f"{percentile(beside, 0.99, False):.2f}",
                "largest beside it, ms": f"{percentile(beside, 1.0, False):.2f}",
                "p50 while it is read, ms": f"{percentile(beside, 0.5, True):.2f}",
                "prompt read after, ms": f"{1000 * statistics.median(read_after):.0f}",
            }
        )
    is_same = len(digests) == len(prompt_digests) == 1
    notes = [
        f"{arguments.rows} rows, a prompt of {arguments.tokens} tokens, {arguments.threads} thread(s), model "
        f"{bundle.manifest.name} ({bundle.manifest.precision}); medians of {arguments.rounds} rounds, with the prompt and without "
        "in turns.",
        "Answers and log-probabilities of all rows and of the prompt, in all rounds and with all pieces: "
        f"{'the same to the last bit' if is_same else 'DIFFERENT'}.",
    ]
    about = environment("onnxruntime") | {"rows": arguments.rows, "tokens": arguments.tokens, "threads": arguments.threads}
    write("prompts", "A long prompt beside rows that decode", about, rows, notes)
    if not is_same:
        raise SystemExit("answers depend on the load")


if __name__ == "__main__":
    main()
