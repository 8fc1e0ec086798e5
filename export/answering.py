"""Sample answers made: the graphs of a bundle are asked on the CPU, opened as the server opens them, and what they say is kept.

**The tolerance.** On another kind of processor, with another version of ONNX Runtime or on a device a graph's log-probabilities are
others. Let x be the model's own log-probability of a token in single precision, s the sample's and r the one of a right run
elsewhere. Export has measured |s − x| on the samples, and its gate lets pass what is within a limit of x. So |r − s| is at most
|r − x| + |x − s|, and each part at most the larger of the gate's limit and of what was measured. Twice that is the tolerance. In
single precision the limit is the parity report's, in half precision that of its gate. In int8 the gate bounds means alone, and what
was measured takes the limit's place: the noise of rounding to 8 bits, which is of the same size wherever it arises.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dragoman.export.architectures import architecture_of
from dragoman.export.arguments import ExportError
from dragoman.export.building import Recipe
from dragoman.export.fields import MAX_COPY_BYTES
from dragoman.export.processor import Platform
from dragoman.export.proof.batching import NUM_SLOTS, drive
from dragoman.export.proof.cases import SENTENCES, Pair, Row
from dragoman.export.proof.eager import Floats, Ints
from dragoman.export.proof.quality import LIMITS
from dragoman.export.proof.sessions import open_runner
from dragoman.export.samples import NUM_CANDIDATES, Sample, Samples, ScoredSample, TextSample
from dragoman.export.session import this_platform
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Affixes, Language, Languages, around

MAX_NEW_TOKENS, MAX_SOURCE_TOKENS, NUM_RANDOM_IDS = 24, 128, 72
# From nothing to what is cut; the last but one is as long as random ids are.
TEXTS = ("", "a", SENTENCES[3], SENTENCES[0], SENTENCES[4], " ".join(SENTENCES[:4]), "", " ".join(SENTENCES))
PLACE_OF_RANDOM = 6
# For the tokeniser alone.
OTHER_TEXT = "Größe:\u00a0３ déjà-vu, 犬 </s> 😀!"
PLACES_SCORED = (2, 5)
"""Samples whose answers are scored, a short one and a long one."""


@dataclass(slots=True)
class SampleRow(Row):
    """A greedy row that is forced to begin with some tokens."""

    target_prefix: list[int] = field(default_factory=list)  # these tokens
    # The likeliest tokens of each step, with their log-probabilities; of forced steps, too.
    candidates: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def num_forced(self) -> int:
        """Steps of which what is chosen does not count."""
        return len(self.target_prefix)

    @property
    def is_done(self) -> bool:
        """See `Row`."""
        return self.position == self.num_steps or (self.position > self.num_forced and self.inputs[-1] == self.eos_id)

    def take(self, ids: Ints, log_probs: Floats) -> None:
        """See `Row`."""
        Row.take(self, ids, log_probs)
        if self.position <= self.num_forced:
            self.inputs[-1] = self.target_prefix[self.position - 1]
        told = zip(ids.tolist(), log_probs.tolist(), strict=True)
        self.candidates.append([(token, value) for token, value in told if value > -np.inf])


def make_samples(checkpoint: Checkpoint, directory: Path, recipe: Recipe, tolerance: float) -> Samples:
    """Ask the graphs of a bundle.

    Args:
        checkpoint: What they were made of.
        directory: Where they lie.
        recipe: How they were made.
        tolerance: Of the parity report.

    Raises:
        BundleError: If the graphs cannot be loaded.
        ExportError: If the template's task needs a language that there is not.
    """
    config, tokenizers = checkpoint.model.config, checkpoint.tokenizers
    rows = _rows(checkpoint)
    num_choices = config.target_vocab_size if recipe.shortlist is None else len(recipe.shortlist)
    with open_runner(directory, config, recipe.precision, is_on_cpu=True) as runner:
        drive(runner, rows, NUM_SLOTS, min(NUM_CANDIDATES, num_choices), False)
        samples = [_sample(row, config) for row in rows]
        pairs = [_pair(samples[place], config) for place in PLACES_SCORED]
        scores = [runner.score([pair])[0][0].tolist() for pair in pairs]
    found = [(sample.source, [*sample.target_prefix, *sample.ids], sample.decoder_start_id, sample.log_probs) for sample in samples]
    difference = max(
        _difference(checkpoint, source, target, start, log_probs, recipe.shortlist) for source, target, start, log_probs in found
    )
    for pair, values in zip(pairs, scores, strict=True):
        difference = max(difference, _difference(checkpoint, pair.source, pair.target, pair.decoder_start_id, values, None))
    is_widened = recipe.precision == "bf16"
    return Samples(
        platform=Platform() if is_widened else this_platform(),
        device=runner.device,
        tolerance=_rounded_up(2 * max(LIMITS.get(recipe.precision, tolerance), difference)),
        are_scores_exact=sum(path.stat().st_size for path in directory.glob("*.weights")) <= MAX_COPY_BYTES,
        max_new_tokens=max(row.num_steps - row.num_forced for row in rows),
        samples=samples,
        pairs=[
            ScoredSample(pair.source, pair.target, values, pair.decoder_start_id)
            for pair, values in zip(pairs, scores, strict=True)
        ],
        texts=[
            TextSample(text, tokenizers.source.encode(text), sample.ids, tokenizers.target.decode(sample.ids))
            for text, sample in zip((*TEXTS[1:], OTHER_TEXT), samples, strict=True)
            if text
        ],
    )


def _rows(checkpoint: Checkpoint) -> list[SampleRow]:
    """Return greedy rows that have yet to be driven, in a language each where there are several; the same ones every time."""
    config, tokenizer = checkpoint.model.config, checkpoint.tokenizers.source
    architecture = architecture_of(config)
    languages = _languages(checkpoint.languages or Languages(), len(TEXTS))
    said = [around(checkpoint.template, *pair, config.eos_id) for pair in languages]
    try:
        tasks = [checkpoint.template.task_text(*pair) for pair in languages]
    except ValueError as error:
        raise ExportError(f"the model cannot be served: {error}") from error
    texts = tokenizer.encode_batch([task + text for task, text in zip(tasks, TEXTS, strict=True)])
    texts[PLACE_OF_RANDOM] = _random_ids(config)
    longest = min(config.max_source_positions, MAX_SOURCE_TOKENS)
    if architecture.has_prompts:
        longest = min(longest, config.max_target_positions // 2)  # the other half is for the answer
    sources = [_source(text, affixes, longest, config) for text, affixes in zip(texts, said, strict=True)]
    # The same number of tokens for all, so that the one that is allowed least is allowed as many as the others.
    room = min(
        config.room_after(len(source)) - len(affixes.target_prefix) for (source, _), affixes in zip(sources, said, strict=True)
    )
    return [
        SampleRow(
            source,
            [first],
            len(affixes.target_prefix) + min(MAX_NEW_TOKENS, room),
            config.eos_id,
            target_prefix=list(affixes.target_prefix),
        )
        for (source, first), affixes in zip(sources, said, strict=True)
    ]


def _source(text: Sequence[int], said: Affixes, longest: int, config: ModelConfig) -> tuple[list[int], int]:
    """Return of a text's ids, of which as many are kept as there is room for, what is encoded and what is fed first.

    A prompt begins with the start token and has no end; of all its tokens the last is fed first.
    """
    room = max(longest - len(said.source_prefix) - len(said.source_suffix), 0)
    start = config.decoder_start_id if said.decoder_start_id is None else said.decoder_start_id
    if not architecture_of(config).has_prompts:
        return [*said.source_prefix, *text[:room], *said.source_suffix], start
    *source, first = [start, *said.source_prefix, *text[:room], *said.source_suffix[1:]]
    return source, first


def _languages(languages: Languages, number: int) -> list[tuple[Language | None, Language | None]]:
    """Return pairs of languages: the defaults, or the first, and then others from all over the lists, sources backwards."""
    sides = ((languages.source[::-1], languages.default_source), (languages.target, languages.default_target))
    chosen: list[list[Language | None]] = []
    for known, default in sides:
        usual = next((language for language in known if language.code == default), known[0] if known else None)
        others = [known[place * len(known) // number] for place in range(1, number)] if known else [None] * (number - 1)
        chosen.append([usual, *others])
    return list(zip(*chosen, strict=True))


def _random_ids(config: ModelConfig) -> list[int]:
    """Draw ids of any token but padding and end-of-sequence."""
    random = np.random.default_rng(5)
    drawn: list[int] = random.integers(0, config.source_vocab_size, 2 * NUM_RANDOM_IDS).tolist()
    return [token for token in drawn if token not in (config.pad_id, config.eos_id)][:NUM_RANDOM_IDS]


def _sample(row: SampleRow, config: ModelConfig) -> Sample:
    """Return what has become of a row."""
    first, start = row.num_forced, row.inputs[0]
    return Sample(
        row.source,
        row.choices[first:],
        row.log_probs[first:],
        row.candidates[first:],
        row.target_prefix,
        None if start == config.decoder_start_id else start,
    )


def _pair(sample: Sample, config: ModelConfig) -> Pair:
    """Return a sample's answer as a target to score; it ends with end-of-sequence, as targets do."""
    room = config.room_after(len(sample.source))
    target = [*sample.target_prefix, *sample.ids][:room]
    if target[-1] != config.eos_id:
        target = [*target[: room - 1], config.eos_id]
    return Pair(sample.source, target, sample.decoder_start_id)


@torch.inference_mode()
def _difference(
    checkpoint: Checkpoint,
    source: list[int],
    target: list[int],
    start: int | None,
    log_probs: Sequence[float],
    shortlist: Sequence[int] | None,
) -> float:
    """Return how far log-probabilities of a target's last tokens are, at the most, from those of the model in single precision."""
    model, number = checkpoint.model, len(log_probs)
    inputs = [model.config.decoder_start_id if start is None else start, *target[:-1]]
    source_ids = torch.tensor([source], dtype=torch.int64)
    hidden = model.decode(torch.tensor([inputs]), *model.encode(source_ids, torch.tensor([len(source)])))
    expected = model.decoder.log_probs(hidden[0, -number:])
    if shortlist is not None:
        expected = expected - expected[:, torch.tensor(shortlist)].logsumexp(-1, keepdim=True)
    of_target = expected.gather(1, torch.tensor(target[-number:])[:, None])[:, 0]
    return float((of_target - torch.tensor(log_probs)).abs().max())


def _rounded_up(value: float) -> float:
    """Return the next number of two digits, so that the last bits of a measured one change no file."""
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-6) * unit:.2g}")
