"""Whether an engine's answer is a sample's: to the last bit, or within a tolerance.

On the platform that samples were computed on, all numbers have to be the same to the last bit: answers on the CPU depend neither
on what else is in the batch nor on the number of threads. Elsewhere two right runs differ by rounding. Let l be the log-probability
that a sample has of a token, m the one that the engine gives, and t the samples' tolerance, which has the errors of both runs in it
(see `dragoman.export.answering`): then |m − l| ≤ t for every token after the same beginning. As long as the tokens are the same,
that is asked of each.

Where they part, the sample chose a and the engine b, so that l(a) ≥ l(b) and m(b) ≥ m(a). Both runs may be right, but then
|m(a) − l(a)| ≤ t and |m(b) − l(b)| ≤ t hold of these two tokens, too, and neither leads by more than 2t. Both runs tell a few of
their likeliest tokens. Of one that is not among them it is known that it lies at or below the last of them, and what follows from
that is asked: m(a) can be l(a) − t or more only if the engine's last is, and m(b) is at most the sample's last and t. What comes
after is an answer to another beginning, and is not compared. Scores have no choices in them: each of their tokens is compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.export.samples import NUM_CANDIDATES, Candidate, Sample, ScoredSample
from dragoman.server.engine.messages import Answer


class ProofFailed(Exception):
    """An engine does not answer as its bundle says it must; the message says in one line which sample shows it, and how."""


@dataclass(slots=True)
class Found:
    """What comparing has found.

    Attributes:
        num_answers: Answers compared, each as often as it was given.
        num_tokens: Tokens of them that were compared.
        num_parted: Answers that went another way where two tokens are as likely, as far as the tolerance can tell.
        num_pairs: Scores compared.
        max_difference: Largest difference of a log-probability.
    """

    num_answers: int = 0
    num_tokens: int = 0
    num_parted: int = 0
    num_pairs: int = 0
    max_difference: float = 0.0


class SampleComparison:
    """Compares answers and scores with samples, and keeps count."""

    def __init__(self, eos_id: int, tolerance: float, is_exact: bool, are_scores_exact: bool) -> None:
        """Compare with a tolerance, or bit by bit.

        Args:
            eos_id: Token that an answer ends with.
            tolerance: How far a log-probability may be from the sample's, where it need not be the same.
            is_exact: Whether answers have to be the same.
            are_scores_exact: Whether scores have to.
        """
        self._eos_id, self._tolerance = eos_id, tolerance
        self._is_exact, self._are_scores_exact = is_exact, are_scores_exact
        self.found = Found()

    def compare_answer(self, name: str, sample: Sample, answer: Answer) -> None:
        """Compare an answer.

        Args:
            name: Of the sample, for messages.
            sample: What it has to be.
            answer: With the likeliest tokens of each position, unless it has to be the same.

        Raises:
            ProofFailed: If it is another.
        """
        ids = generated_ids(name, answer, sample.target_prefix, self._eos_id)
        self.found.num_answers += 1
        for place, (token, expected) in enumerate(zip(ids, sample.ids, strict=False)):
            told = _told(answer, place)
            at, log_prob, wanted = f"{name}, token {place + 1}", answer.log_probs[place], sample.log_probs[place]
            if self._is_exact and told and told[: len(sample.candidates[place])] != sample.candidates[place]:
                raise ProofFailed(f"{at}: {_shown(told)} instead of {_shown(sample.candidates[place])}, bit for bit")
            if token != expected:
                self._check_parting(at, (token, log_prob), (expected, wanted), told, sample.candidates[place])
                self.found.num_parted += 1
                return
            self._check(at, token, log_prob, wanted, self._is_exact)
            self.found.num_tokens += 1
        if len(ids) != len(sample.ids):
            raise ProofFailed(f"{name} has {len(ids)} tokens instead of {len(sample.ids)}")

    def compare_score(self, name: str, pair: ScoredSample, log_probs: Sequence[float]) -> None:
        """Compare a score.

        Args:
            name: Of the pair, for messages.
            pair: What it has to be.
            log_probs: Of the target's tokens.

        Raises:
            ProofFailed: If it is another.
        """
        check_finite(name, log_probs, len(pair.target))
        self.found.num_pairs += 1
        for place, row in enumerate(zip(pair.target, log_probs, pair.log_probs, strict=True)):
            self._check(f"{name}, token {place + 1}", *row, self._are_scores_exact)

    def _check(self, at: str, token: int, log_prob: float, wanted: float, is_exact: bool) -> None:
        """Refuse a log-probability that is not the sample's."""
        difference = abs(log_prob - wanted)
        self.found.max_difference = max(self.found.max_difference, difference)
        if is_exact and log_prob != wanted:
            raise ProofFailed(f"{at}: {token} has {log_prob:.9g} instead of {wanted:.9g}, bit for bit")
        if difference > self._tolerance:
            raise ProofFailed(f"{at}: {token} has {log_prob:.6g} instead of {wanted:.6g}; the tolerance is {self._tolerance:.3g}")

    def _check_parting(
        self, at: str, found: Candidate, expected: Candidate, told: Sequence[Candidate], candidates: Sequence[Candidate]
    ) -> None:
        """Refuse another token, unless both runs may be right; see above."""
        off = f"{at}: {found[0]} ({found[1]:.6g}) instead of {expected[0]} ({expected[1]:.6g})"
        if self._is_exact:
            raise ProofFailed(f"{off}, bit for bit")
        here, there = dict(told), dict(candidates)
        of_expected = here.get(expected[0], _lowest(told))
        is_far = of_expected < expected[1] - self._tolerance
        is_far |= expected[0] in here and of_expected > expected[1] + self._tolerance
        of_found = there.get(found[0], _lowest(candidates))
        is_far |= found[1] > of_found + self._tolerance
        is_far |= found[0] in there and found[1] < of_found - self._tolerance
        if is_far:
            raise ProofFailed(f"{off}; the tolerance is {self._tolerance:.3g}")
        of_both = [(here[token], there[token]) for token in (found[0], expected[0]) if token in here and token in there]
        self.found.max_difference = max(self.found.max_difference, *(abs(a - b) for a, b in of_both), 0.0)


def generated_ids(name: str, answer: Answer, target_prefix: Sequence[int], eos_id: int) -> list[int]:
    """Return the tokens of an answer that have log-probabilities: without the forced prefix, with end-of-sequence.

    Raises:
        ProofFailed: If it does not begin with the prefix, or a log-probability is missing or is no number.
    """
    number = len(target_prefix)
    if answer.token_ids[:number] != [*target_prefix]:
        raise ProofFailed(f"{name} does not begin with the forced prefix")
    ids = [*answer.token_ids[number:], *([eos_id] if answer.reason == "eos" else [])]
    check_finite(name, answer.log_probs, len(ids))
    return ids


def check_finite(name: str, log_probs: Sequence[float], number: int) -> None:
    """Refuse log-probabilities that are not one finite number for each token.

    Raises:
        ProofFailed: Naming the first.
    """
    if len(log_probs) != number:
        raise ProofFailed(f"{name} has {number} tokens with {len(log_probs)} log-probabilities")
    for place, value in enumerate(log_probs, 1):
        if not math.isfinite(value):
            raise ProofFailed(f"{name}, token {place}: the log-probability is {value}")


def _told(answer: Answer, place: int) -> list[Candidate]:
    """Return the likeliest tokens at a position, as far as they are told and can be at all."""
    if place >= len(answer.top_ids) or place >= len(answer.top_log_probs):
        return []
    return [
        (token, value)
        for token, value in zip(answer.top_ids[place], answer.top_log_probs[place], strict=False)
        if value > -math.inf
    ]


def _lowest(candidates: Sequence[Candidate]) -> float:
    """Return what no token that is not among candidates can be above; where they are all there are, there is no other."""
    if not candidates:
        return math.inf
    return candidates[-1][1] if len(candidates) >= NUM_CANDIDATES else -math.inf


def _shown(candidates: Sequence[Candidate]) -> str:
    return " ".join(f"{token} ({value:.9g})" for token, value in candidates)
