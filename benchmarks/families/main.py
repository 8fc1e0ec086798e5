"""Every family and variant, from the folder that Transformers writes to answers over gRPC, beside what Transformers answers itself.

python -m benchmarks.families [VARIANT ...] [--size small real] [--questions 200]
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.families.agreement import compare, log_prob_differences
from benchmarks.families.checkpoints import Size, make_checkpoint
from benchmarks.families.reference import Question, Reference
from benchmarks.families.served import answers, ask_alone, ask_together, request, same_bits
from benchmarks.families.texts import sources
from benchmarks.families.variants import VARIANTS
from benchmarks.harness.report import environment, read, write
from benchmarks.harness.served import ServedModel
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.padding import pad
from dragoman.v1.generation_pb2_grpc import GenerationStub

ROOT = Path(__file__).parents[2]
SIZES = ("small", "real")
REAL = ("marian", "bart", "t5-v1.1")
"""At a real size where no variant is named: opus-mt-en-de's, bart-base's and Flan-T5-base's."""
NEW_TOKENS = 24
"""Asked for where a checkpoint says no length."""

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "4 best": {"num_beams": 4, "num_return_sequences": 4},
    "defaults": {},
}
"""What is asked beyond a model's defaults, in the names that Transformers and requests share."""


NOTES = (
    "Random weights in every parameter; tokenisers trained on the licence's text; `generation_config` as published, its "
    "lengths scaled. A row has as many questions as stand after the strokes, languages in turn, each asked over gRPC of a "
    "bundle that `dragoman import --export` made.",
    "*eager*: largest difference of logits, both in PyTorch, in single precision. *log p*: largest difference from "
    "Transformers in double precision of a log-probability that the server told, of the tokens of greedy answers and of the "
    "five likeliest at each position; beside it that of Transformers in single precision. *greedy*, *4 best* (beam search "
    "with 4 beams, all 4 answers, in order), *defaults* (nothing asked for): questions whose answers are those of "
    "`generate` in double precision, token by token. *Ties* are answers that `generate` gives itself when its log-"
    "probabilities are off by as much as they are in single precision; others are in bold. *scores*: largest difference of "
    "scores of the same hypothesis. *same bits in a batch*: answers whose texts, tokens, log-probabilities and scores are "
    "the same to the last bit, each alone and all at once on one stream.",
)


def questions(name: str, count: int) -> list[Question]:
    """Return texts, with the variant's pairs of languages in turn."""
    pairs = VARIANTS[name].pairs
    return [Question(text, *pairs[i % len(pairs)]) for i, text in enumerate(sources(count))]


def import_and_export(folder: Path, checkpoint: Path, bundle: Path, task: str) -> None:
    """Make a bundle of a foreign folder, as a user does."""
    options = ["--name", bundle.name, "--task", task, "--export", str(bundle)]
    command = [sys.executable, "-m", "dragoman", "import", str(folder), str(checkpoint), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"dragoman import failed:\n{done.stdout}{done.stderr}")


@torch.inference_mode()
def eager_difference(reference: Reference, checkpoint: Path, asked: Sequence[Question]) -> float:
    """Return how far the imported network's logits are from those of Transformers in single precision, both in PyTorch."""
    model = Checkpoint.load(checkpoint).model
    rows = [reference.source_ids(question) for question in asked]
    end = reference.model.config.eos_token_id
    usable = min(model.config.source_vocab_size, model.config.target_vocab_size)
    targets = torch.tensor([[model.config.decoder_start_id, *(i % usable for i in range(end + 1, end + 12))]] * len(rows))
    width = max(len(row) for row in rows)
    padded = pad(rows, model.config.pad_id)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    theirs = reference.model(input_ids=padded, attention_mask=mask, decoder_input_ids=targets).logits
    ours = model(padded, mask.sum(1), targets)
    is_known = ours.isfinite()  # all but padding, where that is excluded
    return float((ours - theirs)[is_known].abs().max())


def measure(name: str, size: Size, count: int, folder: Path) -> dict[str, Any]:
    """Return a variant's row of the table."""
    foreign, checkpoint, bundle = folder / "foreign", folder / "checkpoint", folder / "bundle" / name
    make_checkpoint(foreign, name, size)
    import_and_export(foreign, checkpoint, bundle, VARIANTS[name].task)
    double, single = (Reference(foreign, name, precision) for precision in ("double", "single"))
    asked = questions(name, count)
    limit = {} if double.has_max_length else {"max_new_tokens": NEW_TOKENS}
    row: dict[str, Any] = {"variant": name, "size": size, "eager": f"{eager_difference(single, checkpoint, asked[:16]):.1e}"}
    with ServedModel(bundle) as server, grpc.insecure_channel(server.address) as channel:
        stub = GenerationStub(channel)  # type: ignore[no-untyped-call]
        requests = {
            search: [request(name, question, f"{search} {i}", **limit, **settings) for i, question in enumerate(asked)]
            for search, settings in SEARCHES.items()
        }
        alone = {search: ask_alone(stub, requests[search]) for search in SEARCHES}
        mixed = ask_together(stub, [request for group in zip(*requests.values(), strict=True) for request in group])
    apart = [response for group in zip(*alone.values(), strict=True) for response in group]
    num_same_bits = sum(same_bits(one, other) for one, other in zip(apart, mixed, strict=True))
    ours, theirs = log_prob_differences((double, single), asked, alone["greedy"])
    row |= {"log p": f"{ours:.1e}", "log p, Transformers in single": f"{theirs:.1e}"}
    differences = [0.0]
    for search, settings in SEARCHES.items():
        told = limit | settings
        found = compare(
            double,
            asked,
            [answers(response, "forced_eos_token_id" in double.defaults) for response in alone[search]],
            double.generate(asked, **told),
            rounding=max(1e-6, 2 * max(ours, theirs)),
            **told,
        )
        row[search] = found.cell()
        differences.append(found.score_difference)
    row |= {"scores": f"{max(differences):.1e}", "same bits in a batch": f"{num_same_bits}/{len(apart)}"}
    return row


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"All, if none is named: {', '.join(VARIANTS)}.")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--questions", type=int, default=200)
    arguments = parser.parse_args()
    for size in arguments.size:
        for name in arguments.variants or (VARIANTS if size == "small" else REAL):
            if size == "real" and VARIANTS[name].real is None:
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = measure(name, size, arguments.questions, Path(folder))
            rows = [row, *(other for other in written() if (other["variant"], other["size"]) != (name, size))]
            rows.sort(key=lambda row: (SIZES.index(row["size"]), list(VARIANTS).index(row["variant"])))
            write("families", "Families of other libraries, against Transformers", about(), rows, NOTES)


def written() -> list[dict[str, Any]]:
    """Return the rows there are of this kind of processor: variants may be measured one by one."""
    section = read("families")
    return [row for row in section.rows if row["variant"] in VARIANTS] if section else []


def about() -> dict[str, Any]:
    """Describe the machine and the versions that matter."""
    return environment("transformers", "torch", "onnxruntime", "tokenizers", "sentencepiece")
