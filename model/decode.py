"""Plain decoding in eager PyTorch: the oracle of every parity test, written to be obviously right rather than fast."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dragoman.model.networks.network import Network


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Stack rows of different lengths into `[B, longest]`, filled up on the right."""
    table = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int64)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(table)


_Found = TypeVar("_Found")


class StepDecoder:
    """A batch of sources, encoded once, that gives next-token log-probabilities one step at a time.

    Attributes:
        steps: What decodes after them.
    """

    def __init__(self, model: Network, sources: Sequence[Sequence[int]], start: "Start | None" = None) -> None:
        """Encode sources.

        Args:
            model: In evaluation mode.
            sources: Sequence[int] without special tokens, or what `start` says.
            start: What sources and answers begin with.
        """
        config, start = model.config, start or Start()
        prompts = [(list(ids), config.decoder_start_id) if start.is_complete else model.prompt(ids) for ids in sources]
        rows = [row for row, _ in prompts]
        device = model.decoder.output_weight.device
        lengths = torch.tensor([len(row) for row in rows], device=device)
        self._device = device
        self._starts = [first if start.decoder_start_id is None else start.decoder_start_id for _, first in prompts]
        self.steps = model.stepper(pad(rows, config.pad_id).to(device), lengths)

    def step(self, previous: Tensor) -> Tensor:
        """Feed one token a row, `[N]`; return log-probabilities of the next, `[N, V]`, see `Predictor.log_probs`."""
        return self.steps.step(previous)

    def begin(self, forced: Sequence[Sequence[int]]) -> Tensor:
        """Feed the first token and all forced tokens but the last, of which rows have equally many; return what to feed next."""
        rows = [[first, *ids] for first, ids in zip(self._starts, forced, strict=True)]
        columns = torch.tensor(rows, device=self._device).T
        for previous in columns[:-1]:
            self.step(previous)
        return columns[-1]


@dataclass(frozen=True, slots=True)
class Start:
    """Beginnings of sources and answers that differ from the model's configuration."""

    forced: Sequence[Sequence[int]] = ()  # for each source the tokens that its answer begins with; none where it is empty
    decoder_start_id: int | None = None  # token the decoder reads first; None for the model's, see `Network.prompt`
    # Whether sources are encoded as they are, as those with a language's tokens are; else see `Network.prompt`.
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished translation."""

    ids: list[int]  # generated ids; neither forced ones nor end-of-sequence are included
    log_probs: list[float]  # log-probability of each generated token; one more than `ids` when end-of-sequence was generated
    score: float  # rank, see `length_normalised`


def _in_step(
    model: Network, search: Callable[..., list[_Found]], sources: Sequence[Sequence[int]], start: Start, max_new_tokens: int
) -> list[_Found]:
    """Search together for the sources that have equally many forced tokens and may get equally many new ones."""
    forced = start.forced or [[] for _ in sources]
    rows: dict[tuple[int, int], list[int]] = {}
    for row, (source, ids) in enumerate(zip(sources, forced, strict=True)):
        encoded = source if start.is_complete else model.prompt(source)[0]
        room = model.config.room_after(len(encoded)) - len(ids)
        rows.setdefault((len(ids), min(max_new_tokens, room)), []).append(row)
    found: dict[int, _Found] = {}
    for (_, limit), group in rows.items():
        of_group = {"sources": [sources[row] for row in group], "forced": [forced[row] for row in group]}
        found.update(zip(group, search(**of_group, start=start, max_new_tokens=limit), strict=True))
    return [found[row] for row in range(len(sources))]


def length_normalised(log_prob: float, length: int, length_penalty: float) -> float:
    """Return log_prob / length^length_penalty, end-of-sequence counted in the length (Transformers' definition)."""
    return log_prob / math.pow(length, length_penalty)


@torch.inference_mode()
def greedy_search(
    model: Network, sources: Sequence[Sequence[int]], max_new_tokens: int, start: Start | None = None
) -> list[Hypothesis]:
    """Take the likeliest token at every step; the lowest id wins a tie.

    Args:
        model: In evaluation mode.
        sources: Sequence[int] without special tokens, unless `start` says otherwise; one batch.
        max_new_tokens: Tokens generated at the most, end-of-sequence included and forced ones not; fewer where the model has no
            room for as many.
        start: What sources and answers begin with.

    Returns:
        One hypothesis a source, scored with a length penalty of 1; forced tokens count in its length, as Transformers has it.
    """
    return _in_step(model, partial(_greedy_search, model), sources, start or Start(), max_new_tokens)


def _greedy_search(
    model: Network, sources: Sequence[Sequence[int]], forced: Sequence[Sequence[int]], start: Start, max_new_tokens: int
) -> list[Hypothesis]:
    """Search with equally many forced tokens for each source, which leave room for `max_new_tokens`."""
    config = model.config
    decoder = StepDecoder(model, sources, start)
    ids: list[list[int]] = [[] for _ in sources]
    log_probs: list[list[float]] = [[] for _ in sources]
    active = list(range(len(sources)))
    previous = decoder.begin(forced)
    for _ in range(max_new_tokens):
        best, previous = decoder.step(previous).max(-1)
        for row, token, log_prob in zip(active, previous.tolist(), best.tolist(), strict=True):
            log_probs[row].append(log_prob)
            if token != config.eos_id:
                ids[row].append(token)
        keep = (previous != config.eos_id).nonzero()[:, 0]
        if len(keep) < len(active):
            active = [active[i] for i in keep.tolist()]
            previous = previous[keep]
            decoder.steps.select(keep)
        if not active:
            break
    scores = [length_normalised(sum(row), len(row) + len(forced[0]), 1.0) for row in log_probs]
    return [Hypothesis(*fields) for fields in zip(ids, log_probs, scores, strict=True)]


@dataclass(slots=True)
class _Beam:
    """The hypotheses of one source: those still growing and those finished."""

    live: list[tuple[float, list[int], list[float]]]
    finished: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False


@torch.inference_mode()
def beam_search(
    model: Network,
    sources: Sequence[Sequence[int]],
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    start: Start | None = None,
) -> list[list[Hypothesis]]:
    """Keep the `num_beams` likeliest prefixes at every step, as Transformers does with `early_stopping=False`.

    A prefix that draws end-of-sequence among the step's best `num_beams` candidates is finished. A source is done when it has
    `num_beams` finished hypotheses and its best live prefix, normalised at its present length, is no better than the worst of
    them. What is still live at `max_new_tokens` competes as it stands.

    Args:
        model: In evaluation mode.
        sources: Sequence[int] without special tokens, unless `start` says otherwise; one batch.
        num_beams: Width.
        max_new_tokens: Tokens generated at the most, end-of-sequence included and forced ones not; fewer where the model has no
            room for as many.
        length_penalty: See `length_normalised`; above 1 favours longer answers. Forced tokens count in the length.
        start: What sources and answers begin with.

    Returns:
        For each source up to `num_beams` hypotheses, best first.
    """
    search = partial(_beam_search, model, num_beams=num_beams, length_penalty=length_penalty)
    return _in_step(model, search, sources, start or Start(), max_new_tokens)


def _beam_search(
    model: Network,
    sources: Sequence[Sequence[int]],
    forced: Sequence[Sequence[int]],
    start: Start,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float,
) -> list[list[Hypothesis]]:
    """Search with equally many forced tokens for each source, which leave room for `max_new_tokens`."""
    config, num_forced = model.config, len(forced[0])
    decoder = StepDecoder(model, sources, start)
    device = model.decoder.output_weight.device
    beams = [_Beam([(0.0, [], [])]) for _ in sources]
    active = beams
    previous = decoder.begin(forced)
    limit = num_forced + max_new_tokens
    for length in range(num_forced + 1, limit + 1):
        log_probs = decoder.step(previous)
        parents: list[int] = []
        first = 0
        for beam in active:
            rows = slice(first, first + len(beam.live))
            totals = log_probs[rows] + torch.tensor([total for total, _, _ in beam.live], device=device)[:, None]
            parents += [first + i for i in _grow(beam, totals, log_probs[rows], num_beams, length, length_penalty, config.eos_id)]
            first = rows.stop
            if length == limit:
                beam.finished += [
                    Hypothesis(ids, steps, length_normalised(total, length, length_penalty)) for total, ids, steps in beam.live
                ]
        active = [beam for beam in active if not beam.is_done]
        if not active or length == limit:
            break
        decoder.steps.select(torch.tensor(parents, device=device))
        previous = torch.tensor([ids[-1] for beam in active for _, ids, _ in beam.live], device=device)
    return [sorted(beam.finished, key=lambda h: -h.score)[:num_beams] for beam in beams]


def _grow(
    beam: _Beam, totals: Tensor, log_probs: Tensor, num_beams: int, length: int, length_penalty: float, eos_id: int
) -> list[int]:
    """Extend one source's beam by a token; return the row (within the beam) each live hypothesis came from, none when done."""
    vocab_size = totals.shape[1]
    best = totals.flatten().topk(min(2 * num_beams, totals.numel()))
    live: list[tuple[float, list[int], list[float]]] = []
    parents: list[int] = []
    for rank, (total, flat) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        if total == -math.inf:
            break  # a vocabulary smaller than the beam: only padding is left
        row, token = divmod(flat, vocab_size)
        _, ids, steps = beam.live[row]
        steps = [*steps, float(log_probs[row, token])]
        if token == eos_id:
            if rank < num_beams:
                beam.finished.append(Hypothesis(ids, steps, length_normalised(total, length, length_penalty)))
        elif len(live) < num_beams:
            live.append((total, [*ids, token], steps))
            parents.append(row)
    beam.finished = sorted(beam.finished, key=lambda h: -h.score)[:num_beams]
    beam.live = live
    if not live:
        beam.is_done = True
    elif len(beam.finished) == num_beams:
        beam.is_done = length_normalised(live[0][0], length, length_penalty) <= beam.finished[-1].score
    return [] if beam.is_done else parents
