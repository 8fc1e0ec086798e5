"""Every search against Transformers' `generate`, which knows nothing of our code, with the weights of the shipped en-de model.

The engine runs its exported bundle in ONNX Runtime and all sources together; Transformers runs the weights in PyTorch.
"""

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PegasusForConditionalGeneration

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import Transformer
from dragoman.model.padding import pad
from dragoman.server.engine.messages import SearchOptions
from dragoman.server.offline import OfflineTranslator

CHECKPOINT = Path(__file__).resolve().parents[4] / "model" / "pretrained" / "en-de"
MAX_NEW_TOKENS = 24
NUM_COMPARED = 8
"""Sentences a test compares, from the list below in turn; all of them and 100 of the corpus with `TEST_LONG`."""

CLOSE = 1e-5
"""Two scores whose relative difference is smaller are a tie: which of the two wins depends on rounding."""

NOTHING = -1e6
"""Less than any answer scores: Transformers fills up with beams of -1e9 where there are fewer answers than beams."""

SUBJECTS = [
    "A man in a blue shirt",
    "Two children",
    "An old woman with a hat",
    "The brown dog",
    "A group of people",
    "Several workers",
]
VERBS = ["is standing", "are playing football", "sleeps", "is looking at a small boat", "jumps over a fence", "sits", "run"]
PLACES = ["on the beach.", "in front of a crowded market in the city while it is raining.", "near a river"]
SENTENCES = [
    *("dog", ".", "Yes!", "a a a a a a", "one, two, three, four, five, six, seven, eight, nine, ten", "A B C D E F G"),
    "The committee postponed its decision until the documents had been translated and signed by both parties.",
    "Where did you put the keys? I have looked for them in the kitchen, in the car, in the garden and under the bed.",
    "very very very very very big red red red ball",
    *(f"{subject} {verb} {place}" for subject, verb, place in product(SUBJECTS, VERBS, PLACES)),
]


@dataclass(frozen=True, slots=True)
class Found:
    """One answer: tokens without end-of-sequence, the forced prefix included, and what it is ranked by."""

    ids: list[int]
    score: float


class Pair:
    """The same model twice."""

    def __init__(self, translator: OfflineTranslator, theirs: PegasusForConditionalGeneration, sources: list[list[int]]) -> None:
        self.translator, self.theirs, self.sources = translator, theirs, sources
        self.config = theirs.config

    def ours(
        self, sources: list[list[int]], options: SearchOptions, max_new_tokens: int = MAX_NEW_TOKENS, start: int | None = None
    ) -> list[list[Found]]:
        """Return each source's answers, best first."""
        finished = self.translator.run(sources, max_new_tokens, options, start)
        return [[Found(answer.token_ids, answer.score) for answer in end.answers] for end in finished]

    def plain(self, ids: list[int]) -> list[int]:
        """Return a row of Transformers' without the start token, padding and end-of-sequence."""
        return [i for i in ids[1:] if i not in (self.config.pad_token_id, self.config.eos_token_id)]

    @torch.inference_mode()
    def generate(self, sources: list[list[int]], options: SearchOptions, max_new_tokens: int, start: int | None = None) -> Any:
        """Run Transformers' `generate` with what the options mean there: a forced token that counts is its first new one."""
        config = self.config
        start = config.decoder_start_token_id if start is None else start
        num_forced = options.num_forced
        assert num_forced in (0, len(options.forced_prefix)) and num_forced <= 1
        prefix = [] if num_forced else options.forced_prefix
        min_new_tokens = options.min_new_tokens and options.min_new_tokens + num_forced
        ids = pad(sources, config.pad_token_id)
        mask = torch.tensor([[1] * len(row) + [0] * (ids.shape[1] - len(row)) for row in sources])
        is_beam = options.num_beams > 1
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens + num_forced,
            min_new_tokens=min_new_tokens or None,
            forced_bos_token_id=options.forced_prefix[0] if num_forced else None,
            forced_eos_token_id=config.eos_token_id if options.is_end_forced else None,
            num_beams=options.num_beams,
            num_return_sequences=options.num_answers,
            do_sample=False,
            early_stopping=options.is_stopped_early if is_beam else None,
            length_penalty=options.length_penalty if is_beam else None,
            repetition_penalty=options.repetition_penalty,
            no_repeat_ngram_size=options.no_repeat_ngram_size or None,
            suppress_tokens=options.suppressed_tokens or None,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            decoder_start_token_id=start,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        fed = torch.tensor([[start, *prefix]] * len(sources))
        return self.theirs.generate(input_ids=ids, attention_mask=mask, decoder_input_ids=fed, generation_config=settings)

    def beams(
        self, sources: list[list[int]], options: SearchOptions, max_new_tokens: int = MAX_NEW_TOKENS, start: int | None = None
    ) -> list[list[Found]]:
        """Return each source's answers as Transformers finds them, best first."""
        found = self.generate(sources, options, max_new_tokens, start)
        rows = map(self.plain, found.sequences.tolist())
        answers = [Found(*fields) for fields in zip(rows, found.sequences_scores.tolist(), strict=True)]
        groups = [answers[i : i + options.num_answers] for i in range(0, len(answers), options.num_answers)]
        return [[answer for answer in group if answer.score > NOTHING] for group in groups]


@pytest.fixture(scope="module")
def pair(shipped_bundle: Callable[[str], Path], as_transformers: Callable[[Transformer], PegasusForConditionalGeneration]) -> Pair:
    """The engine with the exported model, and Transformers' model of the same weights."""
    translator = OfflineTranslator(shipped_bundle("en-de"), max_slots=64, num_threads=1)
    theirs = as_transformers(Checkpoint.load(CHECKPOINT).model)
    eos_id = translator.bundle.manifest.eos_id
    return Pair(translator, theirs, [[*ids, eos_id] for ids in translator.tokenizers.source.encode_batch(SENTENCES)])


@pytest.fixture(scope="module")
def chosen(pair: Pair, request: pytest.FixtureRequest) -> Callable[[int], list[list[int]]]:
    """Return sources for the nth of some tests."""
    if not os.environ.get("TEST_LONG"):
        return lambda n: [pair.sources[(n * NUM_COMPARED + i) % len(pair.sources)] for i in range(NUM_COMPARED)]
    with gzip.open(request.getfixturevalue("multi30k") / "test_2016_flickr.en.gz", "rt", encoding="utf-8") as file:
        texts = file.read().splitlines()[:100]
    corpus = [[*ids, pair.config.eos_token_id] for ids in pair.translator.tokenizers.source.encode_batch(texts)]
    return lambda n: pair.sources + corpus


def check_same(ours: list[list[Found]], theirs: list[list[Found]]) -> None:
    """Require the same answers in the same order with the same scores; only answers that tie may stand in for each other."""
    for found, expected in zip(ours, theirs, strict=True):
        assert [answer.score for answer in found] == pytest.approx([answer.score for answer in expected], rel=CLOSE, abs=CLOSE)
        for answer, other in zip(found, expected, strict=True):
            if answer.ids != other.ids:  # it must be another of theirs, or have lost the last place, by no more than rounding
                rival = next((rival for rival in expected if rival.ids == answer.ids), expected[-1])
                assert answer.score == pytest.approx(rival.score, rel=CLOSE), f"{answer.ids} is not {other.ids}"


RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 3.0},
    {"repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 5},
    {"min_new_tokens": 20},
    {"suppressed_tokens": [16, 14, 269, 282, 516]},
    {"suppressed_tokens": list(range(3, 259))},
    {"forced_prefix": [348]},
    {"forced_prefix": [2164, 619, 948]},
    {"forced_prefix": [348, 348, 348, 348], "no_repeat_ngram_size": 3, "repetition_penalty": 1.5},
    {"forced_prefix": [956, 3335], "min_new_tokens": 12, "repetition_penalty": 0.9, "suppressed_tokens": [16]},
]
"""Rules of both searches; tokens are those of a full stop, a comma and frequent words."""

FORCED: list[tuple[dict[str, Any], int, int | None]] = [
    ({"forced_prefix": [348], "num_forced": 1}, MAX_NEW_TOKENS, None),
    ({"forced_prefix": [348], "num_forced": 1, "length_penalty": 2.0, "is_stopped_early": True}, MAX_NEW_TOKENS, None),
    ({"forced_prefix": [2164], "num_forced": 1, "min_new_tokens": 9, "no_repeat_ngram_size": 3}, MAX_NEW_TOKENS, 948),
    ({"is_end_forced": True}, 1, None),
    ({"is_end_forced": True}, 5, None),
    ({"is_end_forced": True, "length_penalty": 2.0, "is_stopped_early": True}, 8, None),
    ({"is_end_forced": True, "min_new_tokens": 9, "length_penalty": 0.0}, 10, None),
    ({"is_end_forced": True, "forced_prefix": [348], "num_forced": 1, "repetition_penalty": 1.3}, 7, 348),
    ({}, MAX_NEW_TOKENS, 2164),
]
"""Forced tokens and ends, how many tokens may come, and the start token."""

STOPS = [{"length_penalty": by, "is_stopped_early": early} for by in (0.0, 0.6, 1.0, 2.0) for early in (False, True)]
BEAMS: list[tuple[dict[str, Any], int, int | None]] = [
    *(({"num_beams": 2 + i % 4, "num_answers": 2 + i % 4} | stop, MAX_NEW_TOKENS, None) for i, stop in enumerate(STOPS)),
    *(({"num_beams": 5, "num_answers": 5} | stop, MAX_NEW_TOKENS, None) for stop in STOPS),
    *((stop, max_new_tokens, None) for max_new_tokens in (1, 2, 6, 10) for stop in STOPS[2::5]),
    ({"num_answers": 2}, MAX_NEW_TOKENS, None),
    *(({"num_beams": width, "num_answers": width} | rules, MAX_NEW_TOKENS, None) for width in (2, 5) for rules in RULES),
    *FORCED,
]


@pytest.mark.parametrize("case", range(len(BEAMS)))
def test_beam_search(pair: Pair, chosen: Callable[[int], list[list[int]]], case: int) -> None:
    rules, max_new_tokens, start = BEAMS[case]
    options, sources = SearchOptions(**{"num_beams": 4, "num_answers": 4} | rules), chosen(case)
    check_same(pair.ours(sources, options, max_new_tokens, start), pair.beams(sources, options, max_new_tokens, start))


GREEDY = [({}, MAX_NEW_TOKENS, None), *((rules, MAX_NEW_TOKENS, None) for rules in RULES), *FORCED]
GREEDY = [
    ({name: value for name, value in rules.items() if name not in ("length_penalty", "is_stopped_early")}, *rest)
    for rules, *rest in GREEDY
    if "repetition_penalty" not in rules
]


@pytest.mark.parametrize("case", range(len(GREEDY)))
def test_greedy_search(pair: Pair, chosen: Callable[[int], list[list[int]]], case: int) -> None:
    """Transformers has no score for it: its own logits give the log-probabilities."""
    rules, max_new_tokens, start = GREEDY[case]
    options, sources = SearchOptions(**rules), chosen(case)
    found = pair.generate(sources, options, max_new_tokens, start)
    log_probs = torch.stack(found.logits, 1).log_softmax(-1)
    num_given = len(options.forced_prefix) - options.num_forced  # else a forced token has logits, too
    for i, end in enumerate(pair.translator.run(sources, max_new_tokens, options, start)):
        (answer,) = end.answers
        assert answer.token_ids == pair.plain(found.sequences[i].tolist())
        generated = found.sequences[i, 1 + num_given :][: options.num_forced + len(answer.log_probs)]
        expected = log_probs[i, : len(generated)].gather(-1, generated[:, None])[options.num_forced :, 0].tolist()
        assert answer.log_probs == pytest.approx(expected, abs=1e-4)
        counted = expected[:-1] if options.is_end_forced and len(expected) == max_new_tokens else expected
        assert answer.score == pytest.approx(sum(counted) / (len(expected) + options.num_forced), abs=1e-4)


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
@torch.inference_mode()
def test_greedy_search_with_a_repetition_penalty(pair: Pair, chosen: Callable[[int], list[list[int]]], penalty: float) -> None:
    """Transformers, when it is greedy, applies it to logits; ours is always of log-probabilities, as in its beam search."""
    sources = chosen(7)
    for source, end in zip(sources, pair.translator.run(sources, 12, SearchOptions(repetition_penalty=penalty)), strict=True):
        tokens, total, count = [pair.config.decoder_start_token_id], 0.0, 0
        while count < 12 and tokens[-1] != pair.config.eos_token_id:
            logits = pair.theirs(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
            values = logits.log_softmax(-1)
            values[list(set(tokens[1:]))] *= penalty
            tokens.append(int(values.argmax()))
            total, count = total + float(values[tokens[-1]]), count + 1
        (answer,) = end.answers
        assert answer.token_ids == pair.plain(tokens)
        assert answer.score == pytest.approx(total / count, abs=1e-4)


@torch.inference_mode()
def test_alternatives_are_the_likeliest_tokens_each_continued_greedily(
    pair: Pair, chosen: Callable[[int], list[list[int]]]
) -> None:
    prefix, sources = [348], chosen(5)
    options = SearchOptions(num_answers=4, has_alternatives=True, forced_prefix=prefix)
    for source, end in zip(sources, pair.translator.run(sources, MAX_NEW_TOKENS, options), strict=True):
        decoder_input = torch.tensor([[pair.config.decoder_start_token_id, *prefix]])
        logits = pair.theirs(input_ids=torch.tensor([source]), decoder_input_ids=decoder_input).logits[0, -1]
        expected = []
        for token in logits.topk(4).indices.tolist():
            if token == pair.config.eos_token_id:
                expected.append(prefix)
                continue
            found = pair.generate([source], SearchOptions(forced_prefix=[*prefix, token]), MAX_NEW_TOKENS - 1)
            expected.append(pair.plain(found.sequences[0].tolist()))
        assert [answer.token_ids for answer in end.answers] == expected


def test_the_comparison_covers_every_way_to_end(pair: Pair) -> None:
    """It would show little if answers all ended alike, or if every answer to a source were as long as the others."""
    finished = pair.translator.run(pair.sources, MAX_NEW_TOKENS, SearchOptions(5, 5, 2.0))
    answers = [answer for end in finished for answer in end.answers]
    assert {answer.reason for answer in answers} == {"eos", "length"}
    assert len({len(answer.log_probs) for answer in answers}) > 15
