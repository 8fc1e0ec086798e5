"""BLEU and chrF of the shipped models on test_2016: the checkpoint in PyTorch and the bundle in ONNX Runtime, greedy and beam 5.

Published figures are mostly of text that Moses's tokeniser has split, which in French makes words of elided articles and gives
higher BLEU than sacreBLEU's own tokeniser. Where sacremoses is installed, that figure is given too.

Beam search is done twice: with the length penalty of 1 that a request has if it says nothing, and with the one of
`LENGTH_PENALTIES` that does best on the validation text.

python -m benchmarks.quality --data data/multi30k [--bundles bundles bundles-int8]
"""

import argparse
import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.harness.report import environment, write
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.model.evaluate import translate
from dragoman.model.quality import score
from dragoman.server.engine.messages import GREEDY, SearchOptions
from dragoman.server.offline import OfflineTranslator

ROOT = Path(__file__).parents[1]
MODELS = ("en-de", "en-fr")
LENGTH_PENALTIES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)


def best_length_penalty(translator: OfflineTranslator, sources: Sequence[str], references: Sequence[str]) -> float:
    """Return the penalty with the highest BLEU, lower-cased, in beam search with 5 beams; of equals the first."""
    found = {
        penalty: score(
            translator.translate(sources, search=SearchOptions(num_beams=5, length_penalty=penalty)), references, is_lowercase=True
        ).bleu
        for penalty in LENGTH_PENALTIES
    }
    return max(found, key=found.__getitem__)


def answers(
    name: str, folders: Sequence[Path], sources: list[str], validation: tuple[Sequence[str], Sequence[str]]
) -> dict[str, list[str]]:
    """Translate in every way there is."""
    checkpoint = Checkpoint.load(ROOT / "model/pretrained" / name)
    found = {
        "checkpoint, greedy": translate(checkpoint.model, checkpoint.tokenizers, sources),
        "checkpoint, beam 5": translate(checkpoint.model, checkpoint.tokenizers, sources, num_beams=5),
    }
    for folder in folders:
        translator = OfflineTranslator(folder / name)
        kind = f"{translator.bundle.manifest.precision} bundle"
        found[f"{kind}, greedy"] = translator.translate(sources, search=GREEDY)
        found[f"{kind}, beam 5"] = translator.translate(sources, search=SearchOptions(num_beams=5))
        penalty = best_length_penalty(translator, *validation)
        chosen = SearchOptions(num_beams=5, length_penalty=penalty)
        found[f"{kind}, beam 5, length penalty {penalty}"] = translator.translate(sources, search=chosen)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument(
        "--bundles", type=Path, nargs="+", default=[Path("bundles")], help="Folders of bundles, of one precision each."
    )
    arguments = parser.parse_args()
    about = environment("torch", "onnxruntime", "sacrebleu") | {"threads": torch.get_num_threads()}
    rows, signatures = [], set()
    for name in MODELS:
        language = name.rpartition("-")[2]
        test, validation = (
            read_parallel(arguments.data / f"{part}.en.gz", arguments.data / f"{part}.{language}.gz")
            for part in ("test_2016_flickr", "val")
        )
        references = test[1]
        for way, hypotheses in answers(name, arguments.bundles, test[0], validation).items():
            cased, lowercased = score(hypotheses, references), score(hypotheses, references, is_lowercase=True)
            signatures |= {cased.bleu_signature, cased.chrf_signature, lowercased.bleu_signature, lowercased.chrf_signature}
            figures = {
                "BLEU": cased.bleu,
                "chrF": cased.chrf,
                "BLEU lower-cased": lowercased.bleu,
                "chrF lower-cased": lowercased.chrf,
            }
            if find_spec("sacremoses"):
                figures["BLEU lower-cased, Moses tokens"] = moses_bleu(hypotheses, references, language)
            rows.append({"model": name, "decoding": way} | {key: f"{value:.2f}" for key, value in figures.items()})
    about["signatures"] = sorted(signatures)
    write(
        "quality",
        "Quality of the shipped models on test_2016",
        about,
        rows,
        [f"- `{signature}`" for signature in sorted(signatures)],
    )


if __name__ == "__main__":
    main()
