"""A large model from another library's folder to decode steps: seconds and memory of each stage, beside CTranslate2.

    python -m benchmarks.large [--shape nllb-600m|mid|small] [--folder FOLDER] [--threads N]

Every stage is a process of its own, as an operator would run it: `dragoman import`, `dragoman export` in fp32, in int8 and in int8
with a shortlist, then loading and decode steps. It needs `transformers`, `ctranslate2`, and for the largest shape 24 GB of memory
and 30 GB of disk. Folders that a run before has left are taken as they are, and their stages skipped.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.page import Page, output, parser
from benchmarks.harness.processes import Finished, memory_mib, run_python
from dragoman.server.system import available_cores

EXPORTS = {"fp32": ["--precision", "fp32"], "int8": ["--precision", "int8"], "int8, shortlist": ["--precision", "int8"]}
ROWS, SOURCE_TOKENS, WARM_STEPS, NUM_STEPS, FIRST_ID = (1, 8, 64), 20, 8, 24, 10
SECONDS = 20.0
"""Seconds after which no further repetition begins."""
WORD_SCORE = -5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; `num_listed` are the words of the shortlist's text."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    max_positions: int
    num_listed: int


SHAPES = {
    "nllb-600m": Shape(256_206, 1024, 12, 16, 4096, 1024, 8192),
    "mid": Shape(64_000, 256, 2, 4, 1024, 256, 4096),
    "small": Shape(4_000, 64, 2, 4, 128, 128, 500),
}


def make_folder(folder: Path, shape: Shape) -> None:
    """Write a random checkpoint of the shape of NLLB-200-distilled-600M, as `save_pretrained` does."""
    import transformers

    folder.mkdir(parents=True)
    _write_tokenizer(folder, shape.vocab_size)
    sides: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", shape.num_layers), ("attention_heads", shape.num_heads), ("ffn_dim", shape.ffn_dim))
    }
    config = transformers.M2M100Config(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        max_position_embeddings=shape.max_positions,
        activation_function="relu",
        dropout=0.0,
        scale_embedding=True,
        decoder_start_token_id=2,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        init_std=shape.d_model**-0.5,  # for logits about as far apart as standard normals
        **sides,
    )
    transformers.set_seed(0)
    kind: Any = transformers.M2M100ForConditionalGeneration
    kind(config).eval().save_pretrained(folder)


def words(count: int) -> list[str]:
    """Return words of one token each."""
    return [f"w{i}" for i in range(count)]


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a unigram model of SentencePiece: some learnt pieces, and words up to the size."""
    from sentencepiece import sentencepiece_model_pb2
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    from tests.oracles.vocabularies import FAIRSEQ, train

    kind: Any = vars(sentencepiece_model_pb2)["ModelProto"]
    proto = kind.FromString(train("unigram", 200, FAIRSEQ))
    beyond = 1 + len(FAIRSEQ_LANGUAGE_CODES) + 1  # padding (not in the file), languages and a mask
    for i in range(vocab_size - beyond - len(proto.pieces)):
        proto.pieces.add(piece=f"\u2581w{i}", score=WORD_SCORE)
    (folder / "sentencepiece.bpe.model").write_bytes(proto.SerializeToString())
    settings: dict[str, Any] = {"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}
    settings |= {"additional_special_tokens": FAIRSEQ_LANGUAGE_CODES}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def convert(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint of ours as a model of CTranslate2, in 8 bits."""
    from benchmarks.engines.ctranslate2_model import write_model
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.networks.transformer import transformer_of

    write_model(transformer_of(Checkpoint.load(checkpoint).model), folder, "int8")


def _sources(num_rows: int) -> list[list[int]]:
    """Return the same sources at each call, without end-of-sequence."""
    drawn: list[list[int]] = np.random.default_rng(0).integers(FIRST_ID, 200, (num_rows, SOURCE_TOKENS - 1)).tolist()
    return drawn


def _least(run: Callable[[int], float], argument: int, most: int = 7) -> float:
    """Return the least of some measurements."""
    started, found = time.monotonic(), [run(argument)]
    while len(found) < most and time.monotonic() - started < SECONDS:
        found.append(run(argument))
    return min(found)


def dragoman_steps(folder: Path, num_threads: int) -> dict[str, Any]:
    """Load a bundle, measure decode steps and score a pair."""
    from dragoman.export.bundle import Bundle
    from dragoman.server.runtime.onnx import OnnxRunner, OnnxScorer

    before, started = memory_mib(), time.monotonic()
    opened = Bundle.open(folder, is_checked=False)
    runner = OnnxRunner(opened, max(ROWS), num_threads)
    scorer = OnnxScorer(opened, num_threads)
    scorer.open()
    loaded, eos = time.monotonic() - started, opened.manifest.eos_id

    def steps(num_rows: int) -> float:
        runner.prefill([[*source, eos] for source in _sources(num_rows)], list(range(num_rows)))
        tokens, began = np.full(num_rows, opened.manifest.decoder_start_id, np.int64), 0.0
        for position in range(WARM_STEPS + NUM_STEPS):
            began = time.perf_counter() if position == WARM_STEPS else began
            tokens = runner.step(tokens, np.full(num_rows, position, np.int64), 1).ids[:, 0].copy()
        return (time.perf_counter() - began) / NUM_STEPS

    found = {num_rows: 1000 * _least(steps, num_rows) for num_rows in ROWS}
    source = [*_sources(1)[0], eos]
    scorer.score(source, source)
    return _steps_figures(loaded, found, before) | {"choices": opened.manifest.num_choices}


def ctranslate2_steps(folder: Path, num_threads: int) -> dict[str, Any]:
    """Load CTranslate2's model and measure steps: translations of 8 tokens are subtracted from those of 32."""
    ctranslate2: Any = import_module("ctranslate2")
    before, started = memory_mib(), time.monotonic()
    translator: Any = ctranslate2.Translator(str(folder), compute_type="int8", inter_threads=1, intra_threads=num_threads)
    loaded = time.monotonic() - started

    def seconds(num_rows: int, num_tokens: int) -> float:
        texts = [[str(i) for i in source] for source in _sources(num_rows)]
        lengths = {"max_decoding_length": num_tokens, "min_decoding_length": num_tokens, "max_input_length": 0}
        began = time.perf_counter()
        translator.translate_batch(texts, beam_size=1, max_batch_size=max(ROWS), **lengths)
        return time.perf_counter() - began

    found = {}
    for num_rows in ROWS:
        seconds(num_rows, WARM_STEPS)
        times = [_least(partial(seconds, num_rows), count) for count in (WARM_STEPS, WARM_STEPS + NUM_STEPS)]
        found[num_rows] = 1000 * (times[1] - times[0]) / NUM_STEPS
    return _steps_figures(loaded, found, before)


def _steps_figures(loaded: float, step_ms: dict[int, float], before: dict[str, float]) -> dict[str, Any]:
    after = memory_mib()
    memory = {
        "loaded, MiB": round(after["rss"] - before["rss"]),
        "in no file, MiB": round(after["anonymous"] - before["anonymous"]),
    }
    return {"loaded in, s": round(loaded, 2)} | memory | {f"{rows} rows, ms": round(value, 2) for rows, value in step_ms.items()}


class Stages:
    """The stages of one shape in one folder."""

    def __init__(self, folder: Path, name: str, num_threads: int) -> None:
        self._folder, self._name, self._shape, self._num_threads = folder, name, SHAPES[name], num_threads

    def rows(self) -> list[dict[str, Any]]:
        """Run all stages; return a row each."""
        foreign, checkpoint = self._folder / "foreign", self._folder / "checkpoint"
        text = self._folder / "listed.txt"
        text.write_text("\n".join(words(self._shape.num_listed)) + "\n", encoding="utf-8")
        own = ["-m", "benchmarks.large", "--stage"]
        rows = [self._make("made with Transformers", foreign, [*own, "make", self._name, str(foreign)])]
        rows.append(self._make("import", checkpoint, ["-m", "dragoman", "import", str(foreign), str(checkpoint)]))
        for export, options in EXPORTS.items():
            bundle, listed = self._bundle(export), ["--shortlist", str(text)] if "shortlist" in export else []
            command = ["-m", "dragoman", "export", str(checkpoint), str(bundle), *options, *listed]
            rows.append(self._make(f"export {export}", bundle, command))
        theirs = self._folder / "ctranslate2"
        rows.append(self._make("CTranslate2's int8", theirs, [*own, "convert", str(checkpoint), str(theirs)]))
        models = {f"steps {export}": ("bundle", self._bundle(export)) for export in EXPORTS}
        models["steps CTranslate2 int8"] = "ctranslate2", theirs
        for stage, (kind, model) in models.items():
            finished = self._run(stage, [*own, kind, str(model), str(self._num_threads)])
            rows.append(_row(stage, model, finished) | json.loads(finished.output.splitlines()[-1]))
        return rows

    def _bundle(self, export: str) -> Path:
        return self._folder / f"bundle-{export.replace(', ', '-')}"

    def _make(self, stage: str, made: Path, arguments: list[str]) -> dict[str, Any]:
        """Run a stage that makes a folder, unless it is there."""
        if made.exists():
            return _row(stage, made, None)
        try:
            return _row(stage, made, self._run(stage, arguments))
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def _run(self, stage: str, arguments: list[str]) -> Finished:
        print(f"{stage} …", flush=True)
        finished = run_python(arguments, self._folder / f"{stage.replace(' ', '-').replace(',', '')}.log")
        print(f"{stage}: {finished.seconds:.1f} s, {finished.peak_gib:.2f} GiB", flush=True)
        return finished


def _row(stage: str, made: Path, finished: Finished | None) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    taken = {"seconds": round(finished.seconds, 1), "peak, GiB": round(finished.peak_gib, 2)} if finished else {}
    return {"stage": stage} | taken | {"on disk, MiB": round(size / 2**20, 1)}


def run_stage(kind: str, *arguments: str) -> None:
    """Run a stage that this program implements."""
    first, second = arguments
    if kind == "make":
        make_folder(Path(second), SHAPES[first])
    elif kind == "convert":
        convert(Path(first), Path(second))
    else:
        steps = {"bundle": dragoman_steps, "ctranslate2": ctranslate2_steps}[kind]
        print(json.dumps(steps(Path(first), int(second))))


def main() -> None:
    """Run every stage and write the part of this shape."""
    found = parser(__doc__)
    found.add_argument("--shape", choices=SHAPES, help="By default nllb-600m, with --quick small.")
    found.add_argument("--folder", type=Path, help="Keep what is made there; by default a temporary one.")
    found.add_argument("--threads", type=int, default=available_cores())
    found.add_argument("--stage", nargs=3, metavar=("KIND", "FIRST", "SECOND"), help=argparse.SUPPRESS)
    arguments = found.parse_args()
    if arguments.stage:
        run_stage(*arguments.stage)
        return
    shape = arguments.shape or ("small" if arguments.quick else "nllb-600m")
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="large.")))
        folder.mkdir(parents=True, exist_ok=True)
        rows = Stages(folder, shape, arguments.threads).rows()
    packages = ("onnxruntime", "torch", "transformers", "ctranslate2")
    notes = [
        "Peak memory counts mapped files. Memory of a loaded model is what loading and running its sessions added: all, and the "
        "share that lies in no file, which every further engine takes for itself.",
        "A step decodes one token of every row, 8 to 32 tokens after the start, greedily; sources have 20 tokens.",
    ]
    page = Page("large", "A large model, from import to decode steps", output(arguments), packages)
    page.write(f"{shape}, random weights, {arguments.threads} threads", rows, notes)


if __name__ == "__main__":
    main()
