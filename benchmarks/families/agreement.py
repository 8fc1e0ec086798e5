"""How far what is served agrees with Transformers, hypothesis by hypothesis, and whether a tie explains where it does not."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.families.reference import Answer, Noise, Question, Reference
from dragoman.v1 import generation_pb2 as pb

TRIES = 24
"""Disturbances that are tried before a difference is called one."""


@dataclass(slots=True)
class Agreement:
    """What a comparison found.

    Attributes:
        num_questions: How many were asked.
        num_same: Those whose hypotheses are all the same, token by token and in order.
        num_best: Those whose best hypothesis is.
        ties: Indices of those that differ, and that Transformers answers so, too, when what it computes is off by rounding.
        others: Indices of those that differ for no such reason.
        score_difference: Largest between scores of the same hypothesis.
    """

    num_questions: int
    num_same: int = 0
    num_best: int = 0
    ties: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    score_difference: float = 0.0

    def cell(self) -> str:
        """Return the figures for the table."""
        notes = [f"{len(self.ties)} ties"] * bool(self.ties) + [f"**{len(self.others)} others**"] * bool(self.others)
        return f"{self.num_same}/{self.num_questions}" + (f" ({', '.join(notes)})" if notes else "")


def compare(
    reference: Reference,
    questions: Sequence[Question],
    ours: Sequence[Sequence[Answer]],
    theirs: Sequence[Sequence[Answer]],
    rounding: float,
    **settings: object,
) -> Agreement:
    """Compare the hypotheses of the same questions.

    Args:
        reference: Which gave `theirs`.
        questions: What was asked.
        ours: The server's, best first.
        theirs: Transformers', in double precision.
        rounding: How far a log-probability in single precision may be off.
        settings: What `generate` was told.
    """
    found = Agreement(len(questions))
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        found.num_best += our[0].tokens == their[0].tokens
        if _tokens(our) == _tokens(their):
            found.num_same += 1
            pairs = [(a.score, b.score) for a, b in zip(our, their, strict=True) if a.score is not None and b.score is not None]
            found.score_difference = max([found.score_difference, *(abs(a - b) for a, b in pairs)])
            continue
        is_tie = any(
            _tokens(reference.generate([questions[i]], noise=Noise(rounding, seed), **settings)[0]) == _tokens(our)
            for seed in range(TRIES)
        )
        (found.ties if is_tie else found.others).append(i)
    return found


def _tokens(beam: Sequence[Answer]) -> list[tuple[tuple[int, ...], bool]]:
    return [(answer.tokens, answer.is_ended) for answer in beam]


def log_prob_differences(
    references: Sequence[Reference], questions: Sequence[Question], responses: Sequence[pb.GenerateResponse]
) -> tuple[float, float]:
    """Compare log-probabilities of answers' tokens, and of the likeliest beside them, with those that Transformers gives them.

    Args:
        references: In double precision and, to compare with, in single.
        questions: What was asked.
        responses: What the server answered, greedily.

    Returns:
        The largest differences from double precision: of the server, and of Transformers in single precision.
    """
    ours = theirs = 0.0
    for question, response in zip(questions, responses, strict=True):
        answer = response.answers[0]
        steps, end = answer.log_probs, references[0].model.config.eos_token_id
        tokens = list(answer.tokens) + [end] * (len(steps) > 0 and steps[-1].token == end)
        exact, rounded = (reference.log_probs(question, tokens)[-len(steps) :] for reference in references)
        assert [step.token for step in steps] == tokens[-len(steps) :], "log-probabilities of other tokens than were generated"
        for t, step in enumerate(steps):
            for told in (step, *step.top):
                value = float(exact[t, told.token])
                ours = max(ours, abs(told.log_prob - value))
                theirs = max(theirs, abs(float(rounded[t, told.token]) - value))
    return ours, theirs
