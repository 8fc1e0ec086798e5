"""Model of every peer: CTranslate2 with our weights and tokeniser. Runs in the peers' environments, without torch and grpc."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import ctranslate2

from dragoman.model.text.byte_level import ByteLevelTokenizer

MAX_NEW_TOKENS = 256
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}


class Translator:
    """Greedy search for batches of texts.

    CTranslate2 sorts its input by length, computes without padding, and removes a sentence from the batch as soon as it is
    finished, but starts no other in its place.
    """

    def __init__(self, model: Path, precision: str, num_workers: int, num_threads: int, num_parts: int = 1) -> None:
        """Load a model.

        Args:
            model: Folder with CTranslate2's files and our `tokenizer.json`.
            precision: `fp32` or `int8`.
            num_workers: Batches that are computed at the same time.
            num_threads: Threads of each.
            num_parts: Parts of a batch, each for a worker.
        """
        self._tokenizer = ByteLevelTokenizer.load(model)
        self._translator = ctranslate2.Translator(
            str(model), compute_type=COMPUTE_TYPES[precision], inter_threads=num_workers, intra_threads=num_threads
        )
        self._num_parts = num_parts

    def translate(self, texts: Sequence[str]) -> list[str]:
        """Return the translations, in the order of the texts."""
        results = self._translator.translate_batch(
            [[str(i) for i in self._tokenizer.encode(text)] for text in texts],
            beam_size=1,
            max_decoding_length=MAX_NEW_TOKENS,
            max_input_length=0,
            max_batch_size=-(-len(texts) // self._num_parts),
        )
        return [self._tokenizer.decode(map(int, result.hypotheses[0])) for result in results]


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the flags that every peer takes; unknown ones are left to the peer's own parser."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", choices=COMPUTE_TYPES, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--instances", type=int, required=True, help="Batches that the server hands over at the same time.")
    parser.add_argument("--parts", type=int, required=True, help="Into how many CTranslate2 divides each.")
    parser.add_argument("--threads", type=int, required=True, help="For each part.")
    parser.add_argument("--max-batch-size", type=int, required=True)
    parser.add_argument("--delay-ms", type=int, required=True, help="How long a batch that is not full waits for more.")
    return parser.parse_known_args()[0]
