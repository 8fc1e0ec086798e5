"""Dragoman beside CTranslate2 and Transformers: the same weights, the same threads, the same requests, in turns.

    python -m benchmarks.engines [--parts requests throughput captions] [--precisions int8] [--source ../older] [--quick]

`requests`: a random model of Transformer-base's size, answers of exactly 32 tokens, 1 to 64 requests at a time. `throughput`: the
same with as many requests at once as suits each side. `captions`: the shipped en-de model, and the same widened to the size of
Transformer-base, on test_2016, with BLEU beside the speed. Every side runs in the fastest of the settings that are tried on a part
of the work. docs/benchmarks.md has the rules of the comparison.
"""

import argparse
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines.sides import (
    BEFORE,
    BULK,
    CT2,
    ENGINE,
    SERVED,
    TRANSFORMERS,
    Run,
    Stage,
    Work,
    Workload,
    best,
)
from benchmarks.harness.models import MODELS, PRECISIONS, base_checkpoint, checkpoint_of, random_texts
from benchmarks.harness.page import Page, commit, output, parser
from benchmarks.harness.processes import Setting
from dragoman.model.corpus import read_parallel
from dragoman.model.quality import score
from dragoman.server.system import available_cores

PARTS = ("requests", "throughput", "captions")
SEARCHES = {"greedy": 1, "beam 4": 4}
PAUSE_SECONDS = 0.3
"""Seconds, longer than the threads of any side spin after their last work."""
NUM_NEW_TOKENS, MAX_CAPTION_TOKENS, NUM_TEXTS = 32, 128, 512
CONCURRENCY, IN_FLIGHT = (1, 8, 32, 64), (64, 128)
SLOTS, ENGINE_SLOTS, BATCH_ROWS, BATCH_TOKENS = (64, 128), (32, 64, 128), (32, 64, 128), (512, 2048)
TRIED_ROWS, MIN_SENTENCES, WARM_UP = 256, 200, 8
TRANSFORMERS_SOURCE_TOKENS = 16
"""Number of sources for Transformers, which takes as long as all others together."""


def settings(arguments: argparse.Namespace, slots: Sequence[int]) -> list[Setting]:
    """Return the settings to try: replicas divide the threads."""
    return [Setting(count, arguments.threads // count, most) for count in arguments.replicas for most in slots]


def in_rounds(contenders: Mapping[str, Callable[[], Run]], num_rounds: int) -> dict[str, list[Run]]:
    """Run every side once in each round, in rotating order."""
    names, runs = list(contenders), {name: list[Run]() for name in contenders}
    for i in range(num_rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            time.sleep(PAUSE_SECONDS)
            runs[name].append(contenders[name]())
    return runs


def measure(
    ways: Mapping[str, Mapping[str, Work]], texts: Workload, part: int, seconds: float, num_rounds: int, most: int = 0
) -> tuple[dict[str, str], dict[str, list[Run]]]:
    """Find the best setting of every side on a part of the work, then run all sides in rounds.

    Args:
        ways: Settings of each side.
        texts: The work.
        part: Requests that settings are tried on.
        seconds: Approximate duration of a run of the slowest side.
        num_rounds: Number of runs of every side.
        most: Maximum requests of a run, 0 for any number.

    Returns:
        Settings and runs by side.

    Raises:
        RuntimeError: If Dragoman's sides have different answers.
    """
    chosen = {side: best(own, texts.first(part), min(WARM_UP, part)) for side, own in ways.items()}
    slowest = min(run.sentences_per_second for _, run in chosen.values())
    count = part * max(1, round(slowest * seconds / part)) if not most else min(most, max(MIN_SENTENCES, round(slowest * seconds)))
    work = texts.first(count)
    labels = {side: label for side, (label, _) in chosen.items()}
    found = in_rounds({side: partial(ways[side][label], work) for side, label in labels.items()}, num_rounds)
    for side in (SERVED, BULK):
        if side in found and found[side][0].answers != found[ENGINE][0].answers:
            raise RuntimeError("the server's answers are not the engine's")
    return labels, found


def figures(labels: Mapping[str, str], found: Mapping[str, list[Run]], rate: Callable[[Run], float]) -> dict[str, Any]:
    """Return medians, settings, ratios to CTranslate2 in the same rounds, and the share of its answers that equal Dragoman's."""
    row: dict[str, Any] = {}
    for side, runs in found.items():
        row[side] = f"{statistics.median(map(rate, runs)):,.0f}"
        row[f"{side}: setting"] = labels[side]
    if CT2 in found:
        for side in (ENGINE, SERVED, BULK, BEFORE):
            if side in found:
                ratios = [rate(ours) / rate(theirs) for ours, theirs in zip(found[side], found[CT2], strict=True)]
                row[f"{side} ÷ {CT2}"] = f"{statistics.median(ratios):.2f}"
        pairs = list(zip(found[ENGINE][0].answers, found[CT2][0].answers, strict=True))
        row["same answers"] = f"{sum(ours == theirs for ours, theirs in pairs) / len(pairs):.0%}"
    return row


def fixed_lengths(stage: Stage, arguments: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    """Measure `requests` or `throughput` on a model that never ends."""
    rows = []
    for search in arguments.searches:
        for source_tokens in arguments.source_tokens:
            texts = random_texts(stage.checkpoint.tokenizers.byte_level(), source_tokens, NUM_TEXTS)
            sources = stage.checkpoint.tokenizers.source.encode_batch(texts)
            work = Workload(texts, sources, SEARCHES[search], NUM_NEW_TOKENS)
            for count in arguments.concurrency if part == "requests" else (0,):
                ways, tried = requests_ways(stage, arguments, work, count) if count else throughput_ways(stage, arguments, work)
                labels, found = measure(ways, work, tried, arguments.seconds, arguments.rounds)
                if any(len(answer) != NUM_NEW_TOKENS for runs in found.values() for run in runs for answer in run.answers):
                    raise RuntimeError(f"not every answer has {NUM_NEW_TOKENS} tokens")
                case = {"search": search, "source tokens": source_tokens} | ({"requests": count} if count else {})
                rows.append(case | figures(labels, found, lambda run: run.tokens_per_second))
                print(rows[-1], flush=True)
    return rows


def requests_ways(
    stage: Stage, arguments: argparse.Namespace, work: Workload, count: int
) -> tuple[dict[str, Mapping[str, Work]], int]:
    """Return the settings of all sides with so many requests at a time, and how many requests settings are tried on."""
    ours = [setting for setting in settings(arguments, (count * work.num_beams,)) if setting.replicas <= count]
    ways: dict[str, Mapping[str, Work]] = dict(stage.dragoman_ways(ours, ours, (count,), work.num_beams, has_bulk=False))
    workers = [number for number in stage.workers if number <= count]
    if workers:
        ways[CT2] = {
            f"{number} × {stage.num_threads // number}": partial(stage.ctranslate2, number, count // number, "examples")
            for number in workers
        }
    if stage.has_transformers and len(work.sources[0]) < TRANSFORMERS_SOURCE_TOKENS:
        ways[TRANSFORMERS] = {f"1 × {stage.num_threads}": partial(stage.transformers, count)}
    return ways, 2 * count


def throughput_ways(stage: Stage, arguments: argparse.Namespace, work: Workload) -> tuple[dict[str, Mapping[str, Work]], int]:
    """Return the settings of all sides with everything at once, and how many requests settings are tried on."""
    engines, servers = settings(arguments, arguments.engine_slots), settings(arguments, arguments.slots)
    ways: dict[str, Mapping[str, Work]] = dict(stage.dragoman_ways(engines, servers, IN_FLIGHT, work.num_beams, has_bulk=True))
    if stage.workers:
        ways[CT2] = stage.ctranslate2_ways([(rows // work.num_beams, "examples") for rows in arguments.batch_rows])
    return ways, max(TRIED_ROWS // work.num_beams, 2 * max(stage.workers, default=1))


def captions(stage: Stage, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure `captions`."""
    sources, references = read_parallel(*(arguments.data / f"test_2016_flickr.{language}.gz" for language in ("en", "de")))
    sources = sources[: arguments.captions]
    tokenizers, rows = stage.checkpoint.tokenizers, []
    for search in arguments.searches:
        num_beams = SEARCHES[search]
        work = Workload(list(sources), tokenizers.source.encode_batch(list(sources)), num_beams, MAX_CAPTION_TOKENS)
        ways, tried = throughput_ways(stage, arguments, work)
        if stage.workers:
            sizes = [(rows // num_beams, "examples") for rows in arguments.batch_rows]
            ways[CT2] = stage.ctranslate2_ways(sizes + [(tokens // num_beams, "tokens") for tokens in BATCH_TOKENS])
        labels, found = measure(ways, work, tried, arguments.caption_seconds, arguments.rounds, len(sources))
        row = {"search": search, "sentences": len(found[ENGINE][0].answers)}
        row |= figures(labels, found, lambda run: run.sentences_per_second)
        for side in (ENGINE, BEFORE, CT2):
            if side in found:
                answers = [tokenizers.target.decode(ids) for ids in found[side][0].answers]
                row[f"BLEU, {side}"] = f"{score(answers, references[: len(answers)]).bleu:.2f}"
        rows.append(row)
        print(row, flush=True)
    return rows


def notes(arguments: argparse.Namespace, part: str) -> list[str]:
    """Return the notes below the table of a part."""
    unit = "Sentences a second on the first sentences of test_2016" if part == "captions" else "Tokens a second"
    found = [
        f"{unit}, encoder included: medians of {arguments.rounds} rounds in which all sides ran in turns, each with "
        f"{arguments.threads} threads; ratios are medians of the rounds' ratios. `engine`: ids, in process, `2 × 1` being two "
        "engines of one thread; `gRPC`: texts, a call each, from a process on the same cores; `gRPC in bulk`: texts by the "
        "client's `generate_many`; CTranslate2 and Transformers: ids, in process, in batches. Each side runs in the fastest of "
        "its settings. `same answers` is the share on which CTranslate2 and Dragoman agree token by token."
    ]
    if part == "captions":
        found.append(
            "Our sides give the same answers, so one BLEU is for all of them. Beam search ends once all beams are finished."
        )
    else:
        found.append(f"A random Transformer-base whose output bias rules end-of-sequence out: answers of {NUM_NEW_TOKENS} tokens.")
    return found + ([f"`before` is the server of commit {commit(arguments.source)}."] if arguments.source else [])


def parse() -> argparse.Namespace:
    """Read the command line."""
    found = parser(__doc__)
    found.add_argument("--threads", type=int, default=available_cores(), help="That every side computes with.")
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    found.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="Of `captions`.")
    found.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCY), help="Of `requests`.")
    found.add_argument("--source-tokens", nargs="+", type=int, default=[16, 128], help="Of `requests` and `throughput`.")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--seconds", type=float, default=1.5, help="Of one run, at least.")
    found.add_argument("--captions", type=int, default=1000, help="Sentences of test_2016.")
    found.add_argument("--replicas", nargs="+", type=int, help="Of Dragoman, each tried; by default one, and one for each thread.")
    found.add_argument("--serve-flags", default="", help="More flags of `dragoman serve`, as one argument.")
    found.add_argument("--source", type=Path, help="Older checkout whose server takes part, with a bundle by its own exporter.")
    arguments = found.parse_args()
    arguments.replicas = arguments.replicas or sorted({1, arguments.threads})
    arguments.batch_rows, arguments.caption_seconds = BATCH_ROWS, 8.0
    arguments.slots, arguments.engine_slots = SLOTS, ENGINE_SLOTS
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.caption_seconds, arguments.captions = 1, 0.1, 0.1, 64
        arguments.concurrency, arguments.source_tokens, arguments.batch_rows = [1, 16], [16], (64,)
        arguments.slots = arguments.engine_slots = (64,)
    return arguments


def main() -> None:
    """Measure the parts and write them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped
    arguments = parse()
    packages = ("onnxruntime", "grpcio", "torch", "ctranslate2", "transformers")
    page = Page("engines", "Dragoman beside CTranslate2 and Transformers", output(arguments), packages)
    for part in arguments.parts:
        for model in arguments.models if part == "captions" else ("",):
            checkpoint = checkpoint_of(model) if model else base_checkpoint()
            for precision in arguments.precisions:
                flags = shlex.split(arguments.serve_flags)
                with ExitStack() as stack:
                    threads, source = arguments.threads, arguments.source and arguments.source.resolve()
                    stage = Stage(stack, checkpoint, precision, arguments.cache, threads, flags, source)
                    rows = fixed_lengths(stage, arguments, part) if not model else captions(stage, arguments)
                name = f"Captions, {model}, {precision}" if model else f"{part.capitalize()}, {precision}"
                page.write(name, rows, notes(arguments, part))


if __name__ == "__main__":
    main()
