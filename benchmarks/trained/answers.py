"""What different programs answer with the same trained model: Transformers, CTranslate2, and Dragoman through gRPC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.harness.served import ServedModel
from benchmarks.trained.families import MAX_LENGTH, Family
from dragoman.client.sync import Client

BATCH_SIZE = 50


@dataclass(frozen=True, slots=True)
class Way:
    """How answers are searched for.

    Attributes:
        name: Heads its rows.
        num_beams: None for whatever the model's own defaults say.
    """

    name: str
    num_beams: int | None


WAYS = (Way("greedy", 1), Way("beam 4", 4), Way("as the model says", None))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one source.

    Attributes:
        tokens: Its ids, end-of-sequence not included.
        text: Its text.
    """

    tokens: list[int]
    text: str


Answers = dict[Way, list[Answer]]


class Original:
    """A model as Transformers' Trainer saved it.

    Attributes:
        tokenizer: Its tokeniser.
    """

    def __init__(self, family: Family, folder: Path) -> None:
        """Load it, in single precision."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._family = family
        self._known: dict[str, list[Answer]] = {}  # by the settings of `generate`
        self._model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        self._double: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).double().eval()

    def sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what the encoder reads."""
        found: list[list[int]] = self.tokenizer([self._family.prefix + text for text in texts])["input_ids"]
        return found

    @torch.inference_mode()
    def answers(self, texts: Sequence[str], way: Way) -> list[Answer]:
        """Answer with `generate`; what a way does not say is left to it, or to the configuration of the model's task.

        Args:
            texts: The same ones every time.
            way: How to search.
        """
        tasks = getattr(self._model.config, "task_specific_params", None) or {}
        own = {name: value for name, value in tasks.get(self._family.task, {}).items() if name != "prefix"}
        settings = own if way.num_beams is None else {"num_beams": way.num_beams}
        in_force = str(self._model.generation_config.to_dict() | settings)
        if in_force not in self._known:
            self._known[in_force] = self._generate(texts, settings)
        return self._known[in_force]

    def _generate(self, texts: Sequence[str], settings: Mapping[str, Any]) -> list[Answer]:
        answers = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = [self._family.prefix + text for text in texts[start : start + BATCH_SIZE]]
            rows = self._model.generate(**self.tokenizer(batch, return_tensors="pt", padding=True), **settings).tolist()
            decoded = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
            answers += [Answer(self._generated(row), text) for row, text in zip(rows, decoded, strict=True)]
        return answers

    @torch.inference_mode()
    def log_probs(self, source: Sequence[int], answer: Sequence[int]) -> list[torch.Tensor]:
        """Return the distribution before each token that an answer may have, in double precision, up to the one after the last."""
        config = self._double.config
        fed = torch.tensor([[config.decoder_start_token_id, *answer[: MAX_LENGTH - 2]]])
        logits = self._double(input_ids=torch.tensor([list(source)]), decoder_input_ids=fed).logits[0]
        return list(logits.log_softmax(-1))

    @property
    def is_end_forced(self) -> bool:
        """Whether the last token that may come is end-of-sequence, and worth nothing."""
        return self._model.generation_config.forced_eos_token_id is not None

    def end(self) -> int:
        """Return the id of end-of-sequence."""
        return int(self.tokenizer.eos_token_id)

    def _generated(self, row: list[int]) -> list[int]:
        """Return a row of `generate` without its start, its end and what fills it."""
        row = row[1:]
        return row[: row.index(self.end())] if self.end() in row else row


def ctranslate2_answers(original: Original, folder: Path, scratch: Path, texts: Sequence[str], quantization: str) -> Answers:
    """Convert with CTranslate2's own converter and answer with its translator; it has no defaults of a model.

    Raises:
        ImportError: If CTranslate2 is not installed.
    """
    ctranslate2: Any = import_module("ctranslate2")
    converters: Any = import_module("ctranslate2.converters")
    out = scratch / f"ctranslate2-{quantization}"
    converters.TransformersConverter(str(folder)).convert(str(out), quantization=quantization, force=True)
    translator = ctranslate2.Translator(str(out), compute_type=quantization, inter_threads=1)
    tokenizer = original.tokenizer
    sources = [tokenizer.convert_ids_to_tokens(ids) for ids in original.sources(texts)]
    answers: Answers = {}
    for way in WAYS:
        if way.num_beams is None:
            continue
        found = translator.translate_batch(
            sources, beam_size=way.num_beams, length_penalty=1.0, max_decoding_length=MAX_LENGTH - 1, max_batch_size=BATCH_SIZE
        )
        rows = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in found]
        decoded = tokenizer.batch_decode(rows, skip_special_tokens=True)
        answers[way] = [Answer(row, text) for row, text in zip(rows, decoded, strict=True)]
    return answers


def served_answers(bundle: Path, texts: Sequence[str]) -> Answers:
    """Serve a bundle and ask for each text through gRPC, saying no more than the way says."""
    with ServedModel(bundle) as served, Client(served.address) as client:
        [model] = client.models()
        source, target = ("en" if model.source_languages else "", "de" if model.target_languages else "")

        def ask(way: Way) -> list[Answer]:
            results = client.generate_many(
                texts, source_language=source, target_language=target, num_beams=way.num_beams, timeout_seconds=600
            )
            return [Answer(list(result.tokens), result.text) for result in results]

        return {way: ask(way) for way in WAYS}
