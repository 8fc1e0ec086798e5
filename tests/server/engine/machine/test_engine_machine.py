"""The engine under thousands of random operations: nothing is lost, mixed up, leaked or starved.

No starvation means that a request is the first in line for no more steps than the longest prompt and target have tokens.
"""

from collections import Counter
from random import Random
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from structlog.testing import capture_logs

from dragoman.server.engine.engine import MAX_CONSECUTIVE_FAILURES
from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from tests.examples import num_examples
from tests.server.engine.bench import EOS, VOCAB
from tests.server.engine.machine.witness import Witness

NUM_RUNS, OPERATIONS_A_RUN, MAX_ROUNDS = num_examples(80, of=260), 60, 4
MIN_OPERATIONS = 40 * NUM_RUNS
ENDS = ("eos", "length", "cancelled", "deadline", "step_failed", "draining")
KINDS = ("beams", "samples", "alternatives", "greedy")
LOOKS = ("look", "look beside others", "pause")
WAYS = ("encoded ahead", "read in pieces", "read beside others")
MUST_BE_SEEN = (*ENDS, *KINDS, *LOOKS, *WAYS)


def some_search(random: Random) -> SearchOptions:
    """Return one of all kinds, with some of all rules."""
    width, count = random.randint(2, 6), random.randint(1, 6)
    top = random.choice([0, 1, 5, 70]), random.choice([0.5, 0.9, 1.0])
    sampling = Sampling(random.getrandbits(64), random.choice([0.3, 1.0, 5.0]), *top)
    kinds: list[dict[str, Any]] = [
        {"num_beams": width, "num_answers": min(width, count), "is_stopped_early": random.random() < 0.5},
        {"num_answers": count, "sampling": sampling},
        {"num_answers": count, "has_alternatives": True},
        {},
    ]
    few_left = [*range(2, VOCAB - 4)], [*range(VOCAB - 3)], [*range(VOCAB)]  # and sooner or later none
    rules: dict[str, Any] = {
        "length_penalty": random.choice([-1.0, 0.0, 0.6, 2.0]),
        "min_new_tokens": random.randint(1, 6),
        "repetition_penalty": random.choice([0.5, 1.5]),
        "no_repeat_ngram_size": random.randint(1, 3),
        "suppressed_tokens": random.choice([[EOS, 2, 3], *few_left]),
        "forced_prefix": random.choices(range(2, 10), k=random.randint(1, 5)),
        "num_top_log_probs": random.choice([1, 20]),
    }
    rules["num_forced"], rules["is_end_forced"] = random.randint(1, 3), True
    kept = {name: value for name, value in rules.items() if random.random() < 0.2}
    return SearchOptions(**random.choice(kinds) | kept)


def search_of(number: int) -> SearchOptions:
    """Return a search by its number, every fourth one plain greedy, of which every other has a prefix that counts."""
    forced = SearchOptions(forced_prefix=[7, EOS], num_forced=1, length_penalty=0.7, is_end_forced=number % 16 == 4)
    plain = forced if number % 8 else GREEDY
    return some_search(Random(number)) if number % 4 else plain


# By number, because Hypothesis would take longer to draw all the options than the engine to work with them.
SEARCH = st.integers(0, 2000).map(search_of)
FIELDS = st.fixed_dictionaries(
    {
        "request_id": st.integers(0, 15),
        "length": st.integers(0, 14),
        "num_words": st.integers(0, 12),
        "max_new_tokens": st.integers(1, 12),
        "lag": st.sampled_from([0.0, 0.0, 0.0, 0.1, 2.0]),
        "patience": st.sampled_from([None] * 7 + [0.2, 5.0, 30.0]),
        "is_streamed": st.booleans(),
        "decoder_start_id": st.sampled_from([None, None, 0, 5]),
        "priority": st.sampled_from([0, 0, 0, -10, -1, 1, 2, 10]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Events of an engine; the witness checks their results."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen
        self.num_since_trouble = self.num_since_quiet = 0

    @initialize(
        slots=st.sampled_from([6, 4, 9, 13, 2, 1]),
        budget=st.sampled_from([90, 20, 4]),
        ahead=st.sampled_from([16, 3, 0]),
        has_prompts=st.booleans(),
    )
    def start(self, slots: int, budget: int, ahead: int, has_prompts: bool) -> None:
        self.max_slots, self.has_prompts = slots, has_prompts
        self.witness = Witness((slots, budget, ahead, has_prompts), self.seen)

    def operation(self, name: str) -> None:
        self.seen["operations"] += 1
        self.seen[name] += 1
        self.num_since_trouble += 1
        self.num_since_quiet += 1

    def trouble(self, name: str) -> None:
        self.operation(name)
        self.num_since_trouble = 0

    @rule(fields=FIELDS, searches=st.lists(SEARCH, min_size=1, max_size=5))
    def submit(self, fields: dict[str, Any], searches: list[SearchOptions]) -> None:
        """Submit one request or some, under ids that are free or have become so."""
        self.operation("submit")
        for number, search in enumerate(searches):
            self.submit_one(number, search, **fields)

    def submit_one(self, number: int, search: SearchOptions, **fields: Any) -> None:
        request_id = fields.pop("request_id")
        while self.witness.is_outstanding(request_id):
            request_id += 1
        widths = {name: min(getattr(search, name), self.max_slots) for name in ("num_beams", "num_answers")}
        search = msgspec.structs.replace(search, **widths)
        num_words = fields.pop("num_words")
        source = [fields.pop("length"), number, *[7] * num_words]
        if self.has_prompts and num_words < 2:  # a prompt may be empty
            source = source[:num_words]
        limit = max(fields.pop("max_new_tokens"), search.min_new_tokens + 1)
        arrival, patience = self.witness.clock.now - fields.pop("lag"), fields.pop("patience")
        deadline = None if patience is None else arrival + patience
        self.witness.submit(Request(request_id, source, limit, arrival, deadline, search=search, **fields))

    @rule()
    def step(self) -> None:
        self.operation("step")
        self.witness.step()

    @rule(count=st.integers(2, 10))
    def step_on(self, count: int) -> None:
        self.operation("step on")
        for _ in range(count):
            self.witness.step()

    @precondition(lambda self: self.num_since_trouble > 2)
    @rule(request_id=st.integers(0, 20), pick=st.integers(0, 9))
    def cancel(self, request_id: int, pick: int) -> None:
        self.trouble("cancel")
        outstanding = self.witness.outstanding
        self.witness.cancel(outstanding[pick] if pick < len(outstanding) else request_id)

    @precondition(lambda self: self.num_since_trouble > 4)
    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.trouble("wait")
        self.witness.clock.now += seconds

    @precondition(lambda self: self.num_since_trouble > 4)
    @rule(what=st.sampled_from(["step", "prefill", "encode", "place"]), count=st.sampled_from([1, 1, 1, MAX_CONSECUTIVE_FAILURES]))
    def fail(self, what: str, count: int) -> None:
        self.trouble("fail")
        for _ in range(count):
            self.witness.runner.fail_next = what
            self.witness.step()
            self.witness.runner.fail_next = None

    @precondition(lambda self: self.num_since_trouble > 4)
    @rule()
    def fail_refetch(self) -> None:
        """Let the model raise where somebody has to see more of a step, if anybody has to in the next few."""
        self.trouble("fail look")
        self.witness.runner.fail_next = "look"
        for _ in range(5):
            self.witness.step()
        self.witness.runner.fail_next = None

    def searches_that_advance(self) -> list[Any]:
        """Return the sequences whose search advances in the next step, which those do not that wait for a look."""
        engine = self.witness.engine
        return [sequence for sequence in engine._searching if sequence not in engine._refetch]

    @precondition(lambda self: self.num_since_trouble > 4 and self.searches_that_advance())
    @rule(pick=st.integers(0, 30))
    def fail_a_search(self, pick: int) -> None:
        self.trouble("fail a search")
        searching = self.searches_that_advance()
        self.witness.spoil(searching[pick % len(searching)])

    @precondition(lambda self: self.num_since_quiet > 15)
    @rule()
    def end_all(self) -> None:
        self.operation("end all")
        self.num_since_quiet = 0
        self.witness.end_all()

    @precondition(lambda self: self.num_since_quiet > 25)
    @rule()
    def drain(self) -> None:
        self.operation("drain")
        self.num_since_quiet = 0
        self.witness.drain()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "witness"):
            self.witness.check_books()

    def teardown(self) -> None:
        if hasattr(self, "witness"):
            self.witness.drain()
            self.witness.check_books()


def test_nothing_is_lost_mixed_up_leaked_or_starved() -> None:
    seen: Counter[str] = Counter()
    size = settings(max_examples=NUM_RUNS, stateful_step_count=OPERATIONS_A_RUN, deadline=None, derandomize=False, print_blob=True)
    for _ in range(MAX_ROUNDS):  # one nearly always; another where chance has left something out
        with capture_logs():
            run_state_machine_as_test(lambda: EngineMachine(seen), settings=size)
        if seen["operations"] >= MIN_OPERATIONS and all(seen[name] for name in MUST_BE_SEEN):
            return
    raise AssertionError(f"too little happened, or something never: {seen}")
