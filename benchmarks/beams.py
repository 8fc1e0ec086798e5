"""Beam search as it is served, against three other implementations on the same weights, answer by answer.

    python -m benchmarks.beams --data data/multi30k [--bundles bundles]

The 1,000 sentences of test_2016 go through gRPC to a real server, 32 at a time, and each answer, with its score, is compared with
the oracle's (`model/decode.py`), with that of Transformers' `generate`, and with CTranslate2's where that is installed. Of answers
that differ, a referee says whether they are as good as each other.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from grpc import aio

from benchmarks.agreement import TIE, Agreement, Referee, compare
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.model.decode import beam_search
from dragoman.model.ids import Ids
from dragoman.model.networks.transformer import transformer_of
from dragoman.model.quality import Scores, score
from dragoman.v1 import generation_pb2, generation_pb2_grpc
from tests.oracles import ctranslate2_model, transformers_model
from tests.oracles.transformers_model import Beam

ROOT = Path(__file__).parents[1]
NUM_BEAMS, LENGTH_PENALTY, MAX_NEW_TOKENS = 5, 1.0, 256
CONCURRENCY = 32
BATCH_ROWS = 32
ORACLE, TRANSFORMERS, CTRANSLATE2 = "oracle", "Transformers", "CTranslate2"


async def serve(address: str, texts: Sequence[str], *, is_stopped_early: bool) -> list[Beam]:
    """Translate with a server, in calls of one text each."""
    places = asyncio.Semaphore(CONCURRENCY)
    async with aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]

        async def translate(text: str) -> Beam:
            request = generation_pb2.GenerateRequest(
                text=text,
                num_beams=NUM_BEAMS,
                num_return_sequences=NUM_BEAMS,
                length_penalty=LENGTH_PENALTY,
                max_new_tokens=MAX_NEW_TOKENS,
                early_stopping=is_stopped_early,
            )
            async with places:
                response = await stub.Generate(request)
            return [(list(answer.tokens), answer.score) for answer in response.answers]

        return await asyncio.gather(*(translate(text) for text in texts))


def in_batches(sources: Sequence[Ids], decode: Callable[[list[Ids]], list[Beam]]) -> list[Beam]:
    """Decode in batches of similar length; beams come back in the order of the sources."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    beams: dict[int, Beam] = {}
    for start in range(0, len(order), BATCH_ROWS):
        rows = order[start : start + BATCH_ROWS]
        beams |= zip(rows, decode([sources[i] for i in rows]), strict=True)
    return [beams[i] for i in range(len(sources))]


def oracle(checkpoint: Checkpoint, sources: Sequence[Ids]) -> list[Beam]:
    """Decode with `model/decode.py`."""

    def decode(batch: list[Ids]) -> list[Beam]:
        found = beam_search(checkpoint.model, batch, NUM_BEAMS, MAX_NEW_TOKENS, LENGTH_PENALTY)
        return [[(hypothesis.ids, hypothesis.score) for hypothesis in beam] for beam in found]

    return in_batches(sources, decode)


def transformers(checkpoint: Checkpoint, sources: Sequence[Ids]) -> list[Beam]:
    """Decode with Transformers' `generate`."""
    theirs = transformers_model.to_transformers(transformer_of(checkpoint.model))
    return in_batches(sources, lambda batch: transformers_model.generate(theirs, batch, NUM_BEAMS, LENGTH_PENALTY, MAX_NEW_TOKENS))


def ctranslate2(checkpoint: Checkpoint, sources: Sequence[Ids]) -> list[Beam] | None:
    """Decode with CTranslate2; None where it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ctranslate2_model.write_model(transformer_of(checkpoint.model), Path(folder))
        except ImportError:
            return None
        pad_id = checkpoint.model.config.pad_id
        num_threads = torch.get_num_threads()
        return ctranslate2_model.translate(Path(folder), sources, NUM_BEAMS, LENGTH_PENALTY, MAX_NEW_TOKENS, pad_id, num_threads)


def compare_model(name: str, bundles: Path, sources: list[str], references: list[str]) -> list[dict[str, Any]]:
    """Return a model's rows of the table, each with its differences under a key of their own."""
    checkpoint = Checkpoint.load(ROOT / "model/pretrained" / name)
    with ServedModel(bundles / name) as server:
        served = {early: asyncio.run(serve(server.address, sources, is_stopped_early=early)) for early in (False, True)}
    ids = checkpoint.tokenizers.source.encode_batch(sources)
    by_ctranslate2 = ctranslate2(checkpoint, ids)  # before the weights become double
    checkpoint.model.double()
    referee = Referee(transformer_of(checkpoint.model), ids, MAX_NEW_TOKENS, LENGTH_PENALTY)
    others = [(ORACLE, False, oracle(checkpoint, ids)), (TRANSFORMERS, False, transformers(checkpoint, ids))]
    if by_ctranslate2 is not None:
        others.append((CTRANSLATE2, True, by_ctranslate2))

    def quality(beams: list[Beam], is_lowercase: bool) -> Scores:
        return score([checkpoint.tokenizers.target.decode(beam[0][0]) for beam in beams], references, is_lowercase)

    rows = []
    for other, early, theirs in others:
        agreement = compare(served[early], theirs, referee)
        row: dict[str, Any] = {"model": name, "served": "early_stopping" if early else "as it comes", "compared with": other}
        row |= agreement.row()
        for key, is_lowercase in (("BLEU", False), ("BLEU lower-cased", True)):
            pair = quality(served[early], is_lowercase), quality(theirs, is_lowercase)
            row[key] = " / ".join(f"{scores.bleu:.2f}" for scores in pair)
        rows.append(row | {"found": describe(name, other, agreement, checkpoint)})
    return rows


def describe(name: str, other: str, agreement: Agreement, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return every difference, ready for JSON and for the report."""
    decode = checkpoint.tokenizers.target.decode
    return [
        {
            "model": name,
            "compared with": other,
            "line": difference.index + 1,
            "is tie": difference.is_tie,
            "served": decode(difference.ours[0]),
            "served score": difference.ours[1],
            "served score by the referee": difference.referee[0],
            "other": decode(difference.theirs[0]),
            "other score": difference.theirs[1],
            "other score by the referee": difference.referee[1],
        }
        for difference in agreement.differences
    ]


def notes(found: Sequence[dict[str, Any]], has_ctranslate2: bool) -> list[str]:
    """Say how to read the table, and list the differences."""
    lines = [
        f"Beam {NUM_BEAMS}, length_penalty {LENGTH_PENALTY:g}, at most {MAX_NEW_TOKENS} tokens, through gRPC, {CONCURRENCY} calls "
        f"at a time; `all answers` are the {NUM_BEAMS} of each sentence, in order. Two answers tie where the referee, the PyTorch "
        f"model in double precision, gives them scores within {TIE:g}. BLEU is of the served answers and of the others', 13a.",
        "",
        "CTranslate2 ends a search as `early_stopping` does, so it is compared with that; the others with its absence. Oracle and "
        "Transformers compute in double precision, CTranslate2 in single.",
    ]
    if not has_ctranslate2:
        lines.append("CTranslate2 was not installed.")
    for entry in found:
        kind = "a tie" if entry["is tie"] else "NOT a tie"
        lines += [
            "",
            f"- {entry['model']}, line {entry['line']}, {kind} with {entry['compared with']}:",
            f"  - served {entry['served score']:.6f} (referee {entry['served score by the referee']:.6f}): {entry['served']}",
            f"  - other {entry['other score']:.6f} (referee {entry['other score by the referee']:.6f}): {entry['other']}",
        ]
    return lines


def main() -> None:
    """Compare and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundles", type=Path, default=Path("bundles"))
    parser.add_argument("--models", nargs="+", default=["en-de"])
    parser.add_argument("--sentences", type=int, help="Take only so many; by default all.")
    arguments = parser.parse_args()
    about = environment("torch", "onnxruntime", "grpcio", "transformers", "sacrebleu") | {"device": "cpu"}
    try:
        about["versions"]["ctranslate2"] = version("ctranslate2")
    except PackageNotFoundError:
        about["versions"]["ctranslate2"] = "absent"
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        language = name.rpartition("-")[2]
        files = [arguments.data / f"test_2016_flickr.{suffix}.gz" for suffix in ("en", language)]
        sources, references = (lines[: arguments.sentences] for lines in read_parallel(*files))
        rows += compare_model(name, arguments.bundles, sources, references)
    found = [difference for row in rows for difference in row.pop("found")]
    about["differences"] = found
    has_ctranslate2 = any(row["compared with"] == CTRANSLATE2 for row in rows)
    write("beams", "Beam search, served and by others", about, rows, notes(found, has_ctranslate2))


if __name__ == "__main__":
    main()
