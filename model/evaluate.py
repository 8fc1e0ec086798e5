"""Translations of a corpus by the eager oracle, and log-probabilities of given targets."""

from collections.abc import Iterator, Sequence

import torch

from dragoman.model.decode import beam_search, greedy_search, pad
from dragoman.model.errors import InputError
from dragoman.model.networks.network import Network
from dragoman.model.quality import MAX_NEW_TOKENS as MAX_NEW_TOKENS
from dragoman.model.text.tokenizers import Tokenizers

BATCH_ROWS = 64


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
            end = "end-of-sequence" if model.config.has_source else "the start token"
            raise InputError(f"line {number}: {len(ids) + 1} tokens, {end} included, where the model takes {limit}")
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


@torch.inference_mode()
def target_log_probs(model: Network, tokenizers: Tokenizers, sources: Sequence[str], targets: Sequence[str]) -> list[list[float]]:
    """Return, for each pair of texts, the log-probability of every token of the target, end-of-sequence last.

    Args:
        model: In evaluation mode.
        tokenizers: Its vocabularies.
        sources: What targets are the answers to; of a language model what they go on with, which may be empty.
        targets: As many.

    Raises:
        InputError: If a pair is longer than the model takes, or a source is missing, with its line number.
    """
    config = model.config
    prompts = [model.prompt(ids) for ids in tokenizers.source.encode_batch(sources)]
    answers = [[*ids, config.eos_id] for ids in tokenizers.target.encode_batch(targets)]
    for number, ((source, _), answer) in enumerate(zip(prompts, answers, strict=True), start=1):
        if config.has_source and not sources[number - 1].strip():
            raise InputError(f"line {number}: there is no source, which a {config.architecture} needs")
        num_source, room = len(source) + (0 if config.has_source else 1), config.room_after(len(source))
        if num_source > config.max_source_positions or len(answer) > room:
            raise InputError(
                f"line {number}: {num_source} source and {len(answer)} target tokens, where the model takes "
                f"{config.max_source_positions} and {room}"
            )
    found: list[list[float]] = [[] for _ in answers]
    for rows in _batches(answers):
        pairs = [prompts[i] for i in rows]
        source_ids = pad([source for source, _ in pairs], config.pad_id)
        lengths = torch.tensor([len(source) for source, _ in pairs])
        inputs = pad([[first, *answers[i][:-1]] for i, (_, first) in zip(rows, pairs, strict=True)], config.pad_id)
        hidden = model.decode(inputs, *model.encode(source_ids, lengths))
        for i, row in zip(rows, hidden, strict=True):  # a large vocabulary's numbers are those of one line at a time
            labels = torch.tensor(answers[i])
            found[i] = model.decoder.log_probs(row[: len(labels)]).gather(-1, labels[:, None])[:, 0].tolist()
    return found


def _batches(sources: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield indices of `BATCH_ROWS` sources of similar length."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), BATCH_ROWS):
        yield order[start : start + BATCH_ROWS]
