"""Plain decoding in eager PyTorch: the oracle of every parity test, written to be obviously right rather than fast."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dragoman.model.attention import merge_heads, scaled_dot_product_attention, split_heads
from dragoman.model.ids import Ids
from dragoman.model.padding import pad
from dragoman.model.transformer import Transformer


class EagerCache:
    """Attention backend for one token a step: keys and values of earlier steps are kept and concatenated."""

    def __init__(self, num_heads: int, cross_kv: list[tuple[Tensor, Tensor]], source_mask: Tensor) -> None:
        """Start with an empty self-attention cache.

        Args:
            num_heads: H.
            cross_kv: Per layer, keys and values `[N, S, H·Dh]` of the encoded sources.
            source_mask: `[N, S]`, True at real tokens.
        """
        self.num_heads = num_heads
        self.cross_kv = [(split_heads(key, num_heads), split_heads(value, num_heads)) for key, value in cross_kv]
        self.source_mask = source_mask[:, None, None, :]
        self.self_kv: list[tuple[Tensor, Tensor] | None] = [None] * len(cross_kv)

    def self_attention(self, layer: int, qkv: Tensor) -> Tensor:
        """Append this step's keys and values, attend to all so far: `[N, 1, 3·H·Dh]` → `[N, 1, H·Dh]`."""
        query, key, value = (split_heads(part, self.num_heads) for part in qkv.chunk(3, -1))
        if (past := self.self_kv[layer]) is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        self.self_kv[layer] = key, value
        return merge_heads(scaled_dot_product_attention(query, key, value))

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the encoded source: `[N, 1, H·Dh]` → `[N, 1, H·Dh]`."""
        attended = scaled_dot_product_attention(split_heads(query, self.num_heads), *self.cross_kv[layer], mask=self.source_mask)
        return merge_heads(attended)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in the given order; a row may be taken more than once."""
        self.source_mask = self.source_mask[rows]
        self.cross_kv = [(key[rows], value[rows]) for key, value in self.cross_kv]
        self.self_kv = [None if past is None else (past[0][rows], past[1][rows]) for past in self.self_kv]


class StepDecoder:
    """A batch of sources, encoded once, that gives next-token log-probabilities one step at a time."""

    def __init__(self, model: Transformer, sources: Sequence[Ids]) -> None:
        """Encode sources given as ids without special tokens."""
        config = model.config
        rows = [[*ids, config.eos_id] for ids in sources]
        device = model.decoder.output_weight.device
        lengths = torch.tensor([len(row) for row in rows], device=device)
        memory, mask = model.encode(pad(rows, config.pad_id).to(device), lengths)
        self.model = model
        self.cache = EagerCache(config.num_heads, model.decoder.project_memory(memory), mask)
        self.position = 0

    def step(self, previous: Tensor) -> Tensor:
        """Feed one token a row, `[N]`; return log-probabilities of the next, `[N, V]`, padding excluded."""
        decoder = self.model.decoder
        position = torch.tensor([self.position], device=previous.device)
        logits = decoder.next_token_logits(decoder(previous[:, None], position, self.cache)[:, 0])
        self.position += 1
        return logits.float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished translation.

    Attributes:
        ids: Generated ids, end-of-sequence not included.
        log_probs: Log-probability of each generated token; one more than `ids` when end-of-sequence was generated.
        score: What it is ranked by, see `length_normalised`.
    """

    ids: list[int]
    log_probs: list[float]
    score: float


def length_normalised(log_prob: float, length: int, length_penalty: float) -> float:
    """Return log_prob / length^length_penalty, end-of-sequence counted in the length (Transformers' definition)."""
    return log_prob / math.pow(length, length_penalty)


@torch.inference_mode()
def greedy_search(model: Transformer, sources: Sequence[Ids], max_new_tokens: int) -> list[Hypothesis]:
    """Take the likeliest token at every step; the lowest id wins a tie.

    Args:
        model: In evaluation mode.
        sources: Ids without special tokens; one batch.
        max_new_tokens: Tokens generated at the most, end-of-sequence included.

    Returns:
        One hypothesis a source, scored with a length penalty of 1.
    """
    config = model.config
    decoder = StepDecoder(model, sources)
    device = model.decoder.output_weight.device
    ids: list[list[int]] = [[] for _ in sources]
    log_probs: list[list[float]] = [[] for _ in sources]
    active = list(range(len(sources)))
    previous = torch.full((len(sources),), config.decoder_start_id, device=device)
    for _ in range(min(max_new_tokens, config.max_target_positions)):
        best, previous = decoder.step(previous).max(-1)
        for row, token, log_prob in zip(active, previous.tolist(), best.tolist(), strict=True):
            log_probs[row].append(log_prob)
            if token != config.eos_id:
                ids[row].append(token)
        keep = (previous != config.eos_id).nonzero()[:, 0]
        if len(keep) < len(active):
            active = [active[i] for i in keep.tolist()]
            previous = previous[keep]
            decoder.cache.select(keep)
        if not active:
            break
    scores = [length_normalised(sum(row), len(row), 1.0) for row in log_probs]
    return [Hypothesis(*fields) for fields in zip(ids, log_probs, scores, strict=True)]


@dataclass(slots=True)
class _Beam:
    """The hypotheses of one source: those still growing and those finished."""

    live: list[tuple[float, list[int], list[float]]]
    finished: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False


@torch.inference_mode()
def beam_search(
    model: Transformer, sources: Sequence[Ids], num_beams: int, max_new_tokens: int, length_penalty: float = 1.0
) -> list[list[Hypothesis]]:
    """Keep the `num_beams` likeliest prefixes at every step, as Transformers does with `early_stopping=False`.

    A prefix that draws end-of-sequence among the step's best `num_beams` candidates is finished. A source is done when it has
    `num_beams` finished hypotheses and its best live prefix, normalised at its present length, is no better than the worst of
    them. What is still live at `max_new_tokens` competes as it stands.

    Args:
        model: In evaluation mode.
        sources: Ids without special tokens; one batch.
        num_beams: Width.
        max_new_tokens: Tokens generated at the most, end-of-sequence included.
        length_penalty: See `length_normalised`; above 1 favours longer answers.

    Returns:
        For each source up to `num_beams` hypotheses, best first.
    """
    config = model.config
    decoder = StepDecoder(model, sources)
    device = model.decoder.output_weight.device
    beams = [_Beam([(0.0, [], [])]) for _ in sources]
    active = beams
    previous = torch.full((len(sources),), config.decoder_start_id, device=device)
    limit = min(max_new_tokens, config.max_target_positions)
    for length in range(1, limit + 1):
        log_probs = decoder.step(previous)
        parents: list[int] = []
        start = 0
        for beam in active:
            rows = slice(start, start + len(beam.live))
            totals = log_probs[rows] + torch.tensor([total for total, _, _ in beam.live], device=device)[:, None]
            parents += [start + i for i in _grow(beam, totals, log_probs[rows], num_beams, length, length_penalty, config.eos_id)]
            start = rows.stop
            if length == limit:
                beam.finished += [
                    Hypothesis(ids, steps, length_normalised(total, length, length_penalty)) for total, ids, steps in beam.live
                ]
        active = [beam for beam in active if not beam.is_done]
        if not active or length == limit:
            break
        decoder.cache.select(torch.tensor(parents, device=device))
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
