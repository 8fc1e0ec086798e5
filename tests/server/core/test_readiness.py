"""When a server of several models is ready, by each rule."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.core.ports import NO_TRAITS, Traits
from dragoman.server.core.readiness import Readiness, ReadyRule

NAMES = ("a", "b", "c")


def models(*are_ready: bool) -> list[Any]:
    return [
        SimpleNamespace(name=name, engine=SimpleNamespace(is_ready=is_ready), traits=NO_TRAITS)
        for name, is_ready in zip(NAMES, are_ready, strict=False)
    ]


def after_all_were_ready(rule: str) -> Readiness:
    readiness = Readiness(ReadyRule.parse(rule))
    readiness.note(models(True, True, True))
    return readiness


@pytest.mark.parametrize(
    ("rule", "ready_with"),
    [
        ("any", lambda a, b, c: a or b or c),
        ("all", lambda a, b, c: a and b and c),
        ("a", lambda a, b, c: a),
        (" c , a,", lambda a, b, c: a and c),
    ],
)
def test_each_rule_asks_for_what_it_says(rule: str, ready_with: Any) -> None:
    for are_ready in product((False, True), repeat=3):
        readiness = after_all_were_ready(rule)
        readiness.note(models(*are_ready))
        assert readiness.is_met(models(*are_ready)) is ready_with(*are_ready), are_ready


@pytest.mark.parametrize("rule", ["any", "all"])
def test_a_server_that_starts_waits_for_every_model(rule: str) -> None:
    """Or a rollout would go on with a model missing."""
    readiness = Readiness(ReadyRule.parse(rule))
    readiness.note(models(True, False))
    assert not readiness.is_met(models(True, False))
    assert readiness.is_met(models(True, True))


def test_models_need_not_have_been_ready_at_the_same_time() -> None:
    readiness = Readiness(ReadyRule.parse("any"))
    readiness.note(models(True, False))
    readiness.note(models(False, True))
    assert readiness.is_met(models(False, True)) and not readiness.is_met(models(False, False))


def test_a_server_that_starts_waits_for_no_model_that_is_not_named() -> None:
    readiness = Readiness(ReadyRule.parse("b"))
    readiness.note(models(False, True, False))
    assert readiness.is_met(models(False, True, False))


def test_what_was_ready_in_another_process_is_not_waited_for() -> None:
    assert Readiness(ReadyRule.parse("any"), ["b"]).is_met(models(True, True))
    readiness = Readiness(ReadyRule.parse("any"), ["b"])
    readiness.note(models(True, False))
    assert readiness.is_met(models(True, False))


def test_a_model_that_comes_later_does_not_take_readiness_away() -> None:
    readiness = Readiness(ReadyRule.parse("any"))
    readiness.note(models(True))
    assert readiness.is_met(models(True, False))


@pytest.mark.parametrize("rule", ["any", "all", "a"])
def test_without_models_nothing_is_ready(rule: str) -> None:
    readiness = Readiness(ReadyRule.parse(rule))
    readiness.note([])
    assert not readiness.is_met([])
    readiness.note(models(False))
    assert not readiness.is_met(models(False))


@pytest.mark.parametrize("text", ["", " ", ",", "any,a", "all, any"])
def test_a_rule_that_says_nothing_or_two_things_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not all, any, or names"):
        ReadyRule.parse(text)


@pytest.mark.parametrize(
    ("rule", "ready_with"),
    [
        ("any", lambda a, b, c: a and (a or b)),
        ("all", lambda a, b, c: a and b),
        ("c", lambda a, b, c: a),
        ("b", lambda a, b, c: a and b),
    ],
)
def test_a_models_own_word_goes_before_the_rule(rule: str, ready_with: Any) -> None:
    """Of three the first says that it is needed, the third that it is not."""
    own = (Traits(is_ready_needed=True), Traits(), Traits(is_ready_needed=False))

    def with_own(*are_ready: bool) -> list[Any]:
        found = models(*are_ready)
        for model, traits in zip(found, own, strict=True):
            model.traits = traits
        return found

    for are_ready in product((False, True), repeat=3):
        readiness = Readiness(ReadyRule.parse(rule))
        readiness.note(with_own(True, True, True))
        assert readiness.is_met(with_own(*are_ready)) is bool(ready_with(*are_ready)), are_ready
