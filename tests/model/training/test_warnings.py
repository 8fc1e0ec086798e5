from typing import Any

import pytest

from dragoman.model.training.config import TrainingConfig
from dragoman.model.training.warnings import Facts, warnings

GOOD: dict[str, Any] = {"max_steps": 1000, "max_tokens": 400, "warmup_steps": 100, "cooldown_steps": 300, "validate_every": 2}
FACTS: dict[str, Any] = {
    "num_pairs": 200,
    "num_left_out": 0,
    "longest_pair": 20,
    "num_steps_per_epoch": 10,
    "vocab_size": 500,
    "validation": ([range(9)], [range(9)]),
}


def found(facts: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    data = dict.fromkeys(("source", "target", "validation_source", "validation_target"), "text")
    fields = {"name": "toy", "data": data, "tokenizer": {"vocab_size": 500}, "training": GOOD | changes}
    return warnings(TrainingConfig.parse(fields, "test"), Facts(**FACTS | (facts or {})))


def test_a_schedule_that_works_is_not_warned_of() -> None:
    assert found() == []


def test_a_run_of_one_step_is_not_told_that_it_cannot_warm_up() -> None:
    assert not any("warmup" in line for line in found(max_steps=1, warmup_steps=1, cooldown_steps=0))


@pytest.mark.parametrize(
    ("facts", "changes", "setting", "said"),
    [
        ({}, {"warmup_steps": 2000}, "training.warmup_steps", "2,000 steps, but training ends after 1,000 steps"),
        ({}, {"warmup_steps": 1000}, "training.warmup_steps", "1,000"),
        ({}, {"warmup_steps": 800}, "training.cooldown_steps", "never gets to learning_rate"),
        ({}, {"validate_every": 101}, "training.validate_every", "1,010 steps"),
        ({"num_steps_per_epoch": 2}, {}, "training.max_tokens", "an epoch of 200 pairs is 2 steps"),
        ({"num_steps_per_epoch": 1}, {}, "training.max_tokens", "an epoch of 200 pairs is 1 step:"),
        ({"longest_pair": 401}, {}, "training.max_tokens", "401 tokens"),
        ({"num_left_out": 11}, {}, "training.max_length", "11 of 211 pairs"),
        ({"vocab_size": 400}, {}, "tokenizer.vocab_size", "400 tokens can be learnt of this text, not 500"),
        ({"validation": ([range(3), range(20)], [range(9)])}, {}, "data.validation_source", "1 of 2 lines are longer"),
        ({"validation": ([range(9)], [range(300)]), "longest_pair": 399}, {}, "data.validation_target", "line 1 has 301 tokens"),
    ],
)
def test_what_cannot_work_is_said_in_a_line_that_begins_with_the_setting(
    facts: dict[str, Any], changes: dict[str, Any], setting: str, said: str
) -> None:
    (line,) = found(facts, **changes)
    assert line.startswith(f"{setting}: ") and said in line and "\n" not in line


def test_fewer_steps_than_an_epoch_are_said() -> None:
    lines = found({"num_steps_per_epoch": 3000})
    assert [line.split(":")[0] for line in lines] == ["training.max_steps", "training.validate_every"]
    assert "1,000 steps are fewer than the 3,000 of an epoch" in lines[0]


def test_some_long_lines_are_no_mistake() -> None:
    assert found({"num_left_out": 10}) == []
    assert found({"validation": ([range(20), *[range(3)] * 19], [range(9)] * 20)}) == []
