"""What export must prove of greedy answers: each token is the one that the eager model chooses after the same beginning."""

from collections.abc import Sequence

import torch

from dragoman.export.eager_pass import product_positions
from dragoman.export.parity import EagerReference, ParityError, Runner, drive
from dragoman.export.row import Row
from dragoman.export.scorer_parity import padded
from dragoman.model.networks.network import Network

NUM_GREEDY_SLOTS, MAX_NEW_TOKENS = 32, 32


def check_greedy(runner: Runner, reference: EagerReference, sources: list[list[int]], tolerance: float) -> tuple[int, int]:
    """Decode greedily with the graphs, and check every token; return the number of tokens and of sources that parted at a tie.

    Greedy decoding is a chain of choices. One pass of the eager model over each answer tells what it would have chosen at every
    position after the same beginning; where all choices are the same, so is the answer, from the first token on.

    Raises:
        ParityError: If one parted elsewhere.
    """
    rows = greedy_rows(reference.model, sources, MAX_NEW_TOKENS)
    drive(runner, rows, NUM_GREEDY_SLOTS, 1, False)
    order = sorted(rows, key=lambda row: (len(row.inputs), len(row.source)))
    num_mismatches = 0
    for start in range(0, len(order), NUM_GREEDY_SLOTS):
        num_mismatches += _count_parted(order[start : start + NUM_GREEDY_SLOTS], reference, tolerance)
    return sum(row.position for row in rows), num_mismatches


def greedy_rows(model: Network, sources: Sequence[list[int]], max_new_tokens: int) -> list[Row]:
    """Return rows that have yet to be driven to the answers to texts, whose ids `sources` are."""
    config = model.config
    prompts = [model.prompt(ids) for ids in sources]
    return [Row(source, [first], min(config.room_after(len(source)), max_new_tokens), config.eos_id) for source, first in prompts]


@torch.inference_mode()
def _count_parted(rows: Sequence[Row], reference: EagerReference, tolerance: float) -> int:
    """Count the rows whose tokens are not all eager's choices, which only ties within the tolerance excuse."""
    model = reference.model
    sources, lengths = (torch.from_numpy(x) for x in padded([row.source for row in rows], model.config.pad_id))
    inputs = torch.from_numpy(padded([row.inputs[:-1] for row in rows], model.config.pad_id)[0])
    answers = [torch.tensor(row.inputs[1:]) for row in rows]
    hidden = model.decode(inputs, *model.encode(sources, lengths))
    found = torch.cat(answers)
    expected, margins = _choices(model, torch.cat([states[: len(ids)] for states, ids in zip(hidden, answers, strict=True)]), found)
    places = [(row, step) for row, ids in zip(rows, answers, strict=True) for step in range(len(ids))]
    parted = (expected != found).nonzero()[:, 0].tolist()
    for place in parted:
        row, step = places[place]
        margin, allowed = float(margins[place]), tolerance
        if not margin < allowed:
            margin, allowed = _in_double(reference, row, step, tolerance)
        if not margin < allowed:  # also refuses NaN
            raise ParityError(
                f"greedy decoding gives token {found[place]} instead of {expected[place]} at step {step} of a source with "
                f"{len(row.source)} tokens, which differ by {margin:.3g} in log-probability; the tolerance is {allowed:.3g}"
            )
    return len({id(places[place][0]) for place in parted})


def _in_double(reference: EagerReference, row: Row, step: int, tolerance: float) -> tuple[float, float]:
    """Return how far a token lies below the best in double precision, and how far it may: both may be off, one up, one down."""
    whole = reference.whole(row.source, row.inputs[1:], row.inputs[0])
    margin = reference.double.margin(whole, step, row.inputs[step + 1])
    return margin, max(tolerance, 2 * reference.allowance(whole).log_prob)


def _choices(model: Network, hidden: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the model chooses after each hidden state `[n, d_model]`, and how far each token found lies below, `[n]` each."""
    choices, margins = [], []
    num_positions = product_positions(model.config.target_vocab_size)
    for start in range(0, len(found), num_positions):
        part = slice(start, start + num_positions)
        log_probs = model.decoder.log_probs(hidden[part])
        best, expected = log_probs.max(-1)
        choices.append(expected)
        margins.append(best - log_probs.gather(1, found[part, None])[:, 0])
    return torch.cat(choices), torch.cat(margins)
