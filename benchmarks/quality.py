"""BLEU and chrF of the shipped models on test_2016: the checkpoint in PyTorch and bundles in ONNX Runtime, greedy and beam 5.

    python -m benchmarks.quality [--precisions fp32 int8] [--models en-de en-fr] [--quick]

Beam search is done twice: with the default length penalty of 1, and with the one that does best on the validation text. Published
figures are mostly of text that Moses's tokeniser has split, which in French makes words of elided articles and gives higher BLEU
than sacreBLEU's own tokeniser; where sacremoses is installed, that figure is given too.
"""

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.models import PRECISIONS, ROOT, bundle_of
from benchmarks.harness.page import Page, output, parser
from dragoman.bulk.translator import Translator
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.model.evaluate import translate
from dragoman.model.quality import score

MODELS = ("en-de", "en-fr")
LENGTH_PENALTIES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
QUICK_LINES = 20


def translated(bundle: Path, sources: Sequence[str], **options: Any) -> list[str]:
    """Translate with a bundle."""
    done = Translator(bundle, **options)({"text": sources})
    assert not any(done["error"]), done["error"]
    return done["translation"]  # type: ignore[return-value]


def best_length_penalty(bundle: Path, sources: Sequence[str], references: Sequence[str]) -> float:
    """Return the penalty with the highest BLEU, lower-cased, in beam search with 5 beams; of equals the first."""
    found = {}
    for penalty in LENGTH_PENALTIES:
        answers = translated(bundle, sources, num_beams=5, length_penalty=penalty)
        found[penalty] = score(answers, references, is_lowercase=True).bleu
    return max(found, key=found.__getitem__)


def answers(
    checkpoint: Checkpoint, precisions: Sequence[str], cache: Path, sources: list[str], validation: tuple[list[str], list[str]]
) -> dict[str, list[str]]:
    """Translate with each engine, precision and search."""
    found = {
        "checkpoint, greedy": translate(checkpoint.model, checkpoint.tokenizers, sources),
        "checkpoint, beam 5": translate(checkpoint.model, checkpoint.tokenizers, sources, num_beams=5),
    }
    for precision in precisions:
        bundle = bundle_of(checkpoint, cache, precision)
        found[f"{precision} bundle, greedy"] = translated(bundle, sources)
        found[f"{precision} bundle, beam 5"] = translated(bundle, sources, num_beams=5)
        penalty = best_length_penalty(bundle, *validation)
        beams = translated(bundle, sources, num_beams=5, length_penalty=penalty)
        found[f"{precision} bundle, beam 5, length penalty {penalty}"] = beams
    return found


def moses_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> float:
    """Return lower-cased BLEU of text split by Moses's tokeniser."""
    tokenizer = importlib.import_module("sacremoses").MosesTokenizer(language)
    split = [
        [tokenizer.tokenize(text.lower(), return_str=True, escape=False) for text in side] for side in (hypotheses, references)
    ]
    bleu: float = importlib.import_module("sacrebleu").corpus_bleu(split[0], [split[1]], tokenize="none", force=True).score
    return bleu


def main() -> None:
    """Score and write the results."""
    found = parser(__doc__)
    found.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = found.parse_args()
    packages = ("torch", "onnxruntime", "sacrebleu")
    page = Page("quality", "Quality of the shipped models on test_2016", output(arguments), packages)
    for name in arguments.models:
        language, rows, signatures = name.rpartition("-")[2], list[dict[str, Any]](), set[str]()
        lines = QUICK_LINES if arguments.quick else None
        test, validation = (
            [list(side)[:lines] for side in read_parallel(*(arguments.data / f"{part}.{each}.gz" for each in ("en", language)))]
            for part in ("test_2016_flickr", "val")
        )
        checkpoint = Checkpoint.load(ROOT / "model/pretrained" / name)
        every = answers(checkpoint, arguments.precisions, arguments.cache, test[0], (validation[0], validation[1]))
        for way, hypotheses in every.items():
            cased, lowercased = score(hypotheses, test[1]), score(hypotheses, test[1], is_lowercase=True)
            signatures |= {cased.bleu_signature, cased.chrf_signature, lowercased.bleu_signature, lowercased.chrf_signature}
            figures = {"BLEU": cased.bleu, "chrF": cased.chrf}
            figures |= {"BLEU lower-cased": lowercased.bleu, "chrF lower-cased": lowercased.chrf}
            if find_spec("sacremoses"):
                figures["BLEU lower-cased, Moses tokens"] = moses_bleu(hypotheses, test[1], language)
            rows.append({"decoding": way} | {key: f"{value:.2f}" for key, value in figures.items()})
        page.write(name, rows, ["\n".join(f"- `{signature}`" for signature in sorted(signatures))])


if __name__ == "__main__":
    main()
