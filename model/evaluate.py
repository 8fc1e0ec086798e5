"""A corpus translated by the eager oracle, and its quality."""

from collections.abc import Iterator, Sequence

from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.errors import InputError
from dragoman.model.ids import Ids
from dragoman.model.networks.network import Network
from dragoman.model.quality import MAX_NEW_TOKENS as MAX_NEW_TOKENS
from dragoman.model.quality import Scores, score
from dragoman.model.text.tokenizers import Tokenizers

BATCH_ROWS = 64


def evaluate(
    model: Network,
    tokenizers: Tokenizers,
    sources: Sequence[str],
    references: Sequence[str],
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> Scores:
    """Translate sources and score the answers against one reference each, cased.

    Raises:
        InputError: As `translate` and `score`.
    """
    return score(translate(model, tokenizers, sources, num_beams, length_penalty), references)


def translate(
    model: Network,
    tokenizers: Tokenizers,
    texts: Sequence[str],
    num_beams: int = 1,
    length_penalty: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """Translate in batches of similar length; answers come back in the order of `texts`.

    Raises:
        InputError: If a text has more tokens than the model has source positions, with its line number.
    """
    sources = tokenizers.source.encode_batch(texts)
    limit = model.config.max_source_positions
    for number, ids in enumerate(sources, start=1):
        if len(ids) >= limit:
            raise InputError(f"line {number}: {len(ids) + 1} tokens, end-of-sequence included, where the model takes {limit}")
    answers = [""] * len(texts)
    for rows in _batches(sources):
        batch = [sources[i] for i in rows]
        if num_beams == 1:
            best = greedy_search(model, batch, max_new_tokens)
        else:
            best = [beam[0] for beam in beam_search(model, batch, num_beams, max_new_tokens, length_penalty)]
        for i, hypothesis in zip(rows, best, strict=True):
            answers[i] = tokenizers.target.decode(hypothesis.ids)
    return answers


def _batches(sources: Sequence[Ids]) -> Iterator[list[int]]:
    """Yield indices of `BATCH_ROWS` sources of similar length."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), BATCH_ROWS):
        yield order[start : start + BATCH_ROWS]
