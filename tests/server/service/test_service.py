"""When a server of several models is ready, by each rule and by models' own settings."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.config import ReadyRule
from dragoman.server.models.model_file import NO_TRAITS, Traits
from dragoman.server.service.service import Readiness

OWN = (Traits(is_ready_needed=True), Traits(), Traits(is_ready_needed=False))


def models(*are_ready: bool, traits: tuple[Traits, ...] = (NO_TRAITS,) * 3) -> list[Any]:
    named = zip("abc", are_ready, traits, strict=False)
    return [SimpleNamespace(name=name, engine=SimpleNamespace(is_ready=ready), traits=own) for name, ready, own in named]


@pytest.mark.parametrize(
    ("rule", "traits", "ready_with"),
    [
        ("any", (NO_TRAITS,) * 3, lambda a, b, c: a or b or c),
        ("all", (NO_TRAITS,) * 3, lambda a, b, c: a and b and c),
        ("a", (NO_TRAITS,) * 3, lambda a, b, c: a),
        (" c , a,", (NO_TRAITS,) * 3, lambda a, b, c: a and c),
        ("any", OWN, lambda a, b, c: a and (a or b)),
        ("all", OWN, lambda a, b, c: a and b),
        ("c", OWN, lambda a, b, c: a),
        ("b", OWN, lambda a, b, c: a and b),
    ],
)
def test_rules_hold_once_all_were_ready_and_models_own_settings_come_first(rule: str, traits: Any, ready_with: Any) -> None:
    for are_ready in product((False, True), repeat=3):
        readiness = Readiness(ReadyRule.parse(rule))
        readiness.note(models(True, True, True, traits=traits))
        now = models(*are_ready, traits=traits)
        readiness.note(now)
        assert readiness.is_met(now) is bool(ready_with(*are_ready)), are_ready


@pytest.mark.parametrize("rule", ["any", "all"])
def test_a_starting_server_waits_for_every_model_once(rule: str) -> None:
    """Or a rollout would go on with a model missing."""
    readiness = Readiness(ReadyRule.parse(rule))
    readiness.note(models(True, False))
    assert not readiness.is_met(models(True, False)) and readiness.is_met(models(True, True))
    readiness.note(models(False, True))
    assert readiness.is_met(models(False, True)) is (rule == "any") and not readiness.is_met(models(False, False))
    named = Readiness(ReadyRule.parse("b"))
    named.note(models(False, True, False))
    assert named.is_met(models(False, True, False)), "models that are not named are not waited for"


def test_models_ready_in_another_process_or_added_later_are_not_waited_for() -> None:
    readiness = Readiness(ReadyRule.parse("any"), ["b"])
    assert readiness.is_met(models(True, True))
    readiness.note(models(True, False))
    assert readiness.is_met(models(True, False))
    later = Readiness(ReadyRule.parse("any"))
    later.note(models(True))
    assert later.is_met(models(True, False)) and not later.is_met([])


@pytest.mark.parametrize("text", ["", " ", ",", "any,a", "all, any"])
def test_a_rule_without_names_or_with_two_meanings_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not all, any, or names"):
        ReadyRule.parse(text)
