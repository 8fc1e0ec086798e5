"""Who calls, and what their limits let in. Clocks are the tests' own."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.core.callers import Caller, Callers
from dragoman.server.core.callers_file import read_book
from dragoman.server.errors import InvalidRequest, LimitReached, Unauthenticated
from dragoman.server.telemetry.caller_metrics import MAX_CALLERS, OTHERS, CallerMetrics


class World:
    """A file of callers, what is made of it, and the time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = 1000.0
        self.registry = CollectorRegistry()
        self.callers: Any = None

    def write(self, text: str) -> None:
        """Change the file; who is known follows."""
        self.path.write_text(text)
        book = read_book(self.path, has_client_certificates=True)
        if self.callers is None:
            clock = lambda: self.seconds  # noqa: E731
            self.callers = Callers(book, CallerMetrics(self.registry), clock=clock, wall_clock=clock)
        else:
            self.callers.replace(book)

    def caller(self, token: str = "s3cret") -> Caller:
        caller: Caller = self.callers.identify([("authorization", f"Bearer {token}")])
        return caller

    def limited(self, limits: str) -> Caller:
        self.write(f'[callers.web]\ntoken = "s3cret"\n{limits}\n')
        return self.caller()

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dragoman_caller_{name}", labels)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "callers.toml")


def refusal(caller: Caller) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        caller.enter()
    return caught.value


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ((("authorization", "Bearer s3cret"),), "web"),
        ((("authorization", "bearer s3cret"), ("other", "x")), "web"),
        ((("authorization", "Bearer s3cret"), ("authorization", "Bearer s3cret")), None),
        ((("authorization", b"Bearer s3cret"),), None),
        ((("authorization", "Bearer \ud800"),), None),
        ((("authorization", "Bearer "),), None),
        ((("authorization", "Basic s3cret"),), None),
        ((), None),
        (None, None),
    ],
)
def test_a_caller_is_who_shows_one_known_token(world: World, metadata: Any, name: str | None) -> None:
    world.write('[callers.web]\ntoken = "s3cret"\n[callers.shop]\ntoken = "0ther"')
    if name is not None:
        assert world.callers.identify(metadata).name == name
    else:
        with pytest.raises(Unauthenticated, match="a bearer token that this server knows is needed"):
            world.callers.identify(metadata)


CERTIFICATES = '[callers.web]\ncertificates = ["web.example.org", "spiffe://a/b"]\n[callers.shop]\ntoken = "s3cret"'


@pytest.mark.parametrize(
    ("metadata", "names", "name"),
    [
        ((), ["web.example.org"], "web"),
        ((), ["unknown", "spiffe://a/b"], "web"),
        ([("authorization", "Bearer s3cret")], ["web.example.org"], "shop"),
        ((), ["WEB.example.org"], None),
        ((), ["x.web.example.org", "*.example.org", ""], None),
        ((), [], None),
        ([("authorization", "Bearer wrong")], ["web.example.org"], None),
    ],
)
def test_a_certificate_names_a_caller_where_no_token_is_shown(world: World, metadata: Any, names: list[str], name: str) -> None:
    world.write(CERTIFICATES)
    if name is not None:
        assert world.callers.identify(metadata, names).name == name
    else:
        with pytest.raises(Unauthenticated, match="token or a client certificate"):
            world.callers.identify(metadata, names)


def test_requests_come_at_their_rate_and_in_bursts(world: World) -> None:
    web = world.limited("requests_per_second = 2\nrequests_burst = 3")
    for _ in range(3):
        web.enter()
    error = refusal(web)
    assert (error.limit, error.code) == ("requests_per_second", "RESOURCE_EXHAUSTED")
    assert error.message.startswith("requests_per_second: 2 are allowed")
    assert error.retry_after_seconds == pytest.approx(0.5, abs=1e-3)
    world.seconds += 0.5
    web.enter()
    assert refusal(web).limit == "requests_per_second"
    world.seconds += 100
    for _ in range(3):
        web.enter()
    refusal(web)


def test_a_refused_request_takes_nothing(world: World) -> None:
    web = world.limited("requests_per_second = 1")
    web.enter()
    for _ in range(100):
        assert refusal(web).retry_after_seconds == pytest.approx(1.0, abs=1e-3)
    world.seconds += 1
    web.enter()


def test_a_slow_rate_lets_one_in_and_then_waits(world: World) -> None:
    web = world.limited("requests_per_second = 0.1")
    web.enter()
    assert refusal(web).retry_after_seconds == pytest.approx(10, abs=1e-3)


def test_used_tokens_are_owed(world: World) -> None:
    web = world.limited("tokens_per_second = 10\ntokens_burst = 50")
    web.enter()
    web.read(30)
    web.leave(generated_tokens=120)
    error = refusal(web)
    assert error.limit == "tokens_per_second"
    assert error.retry_after_seconds == pytest.approx(10, abs=1e-3)
    world.seconds += 9.9
    refusal(web)
    world.seconds += 0.2
    web.enter()


def test_requests_under_way_are_bounded(world: World) -> None:
    web = world.limited("max_requests = 2\nrequests_per_second = 100")
    web.enter()
    web.enter()
    assert refusal(web).limit == "max_requests"
    web.leave(0)
    web.enter()
    assert world.count("requests_running", caller="web") == 2


def test_streams_are_bounded_as_requests_are_and_leave_room_for_theirs(world: World) -> None:
    web = world.limited("max_requests = 1\nrequests_per_second = 100")
    web.enter_stream()
    web.enter()
    with pytest.raises(LimitReached, match="max_requests: 1 streams are open"):
        web.enter_stream()
    web.leave_stream()
    web.enter_stream()


def test_one_callers_limits_are_nobody_elses(world: World) -> None:
    world.write('[defaults]\nrequests_per_second = 1\n[callers.web]\ntoken = "s3cret"\n[callers.shop]\ntoken = "0ther"')
    world.caller().enter()
    refusal(world.caller())
    world.caller("0ther").enter()


def test_priorities_and_slots_above_a_callers_are_refused_by_name(world: World) -> None:
    web = world.limited("max_priority = 2\nmax_slots = 4")
    web.check_priority(2)
    web.check_slots(4, "num_beams")
    with pytest.raises(InvalidRequest, match=r"priority: 3 is above 2, max_priority of caller web"):
        web.check_priority(3)
    with pytest.raises(InvalidRequest, match=r"num_beams: 5 slots are needed; max_slots of caller web is 4"):
        web.check_slots(5, "num_beams")
    assert world.count("refusals_total", caller="web", limit="max_priority") == 1


def test_an_expired_caller_is_told_so(world: World) -> None:
    web = world.limited("expires = 1970-01-01T01:00:00Z")
    web.enter()
    world.seconds = 3600
    with pytest.raises(Unauthenticated, match="caller 'web' expired at 1970-01-01T01:00:00Z"):
        world.caller()
    with pytest.raises(Unauthenticated, match="expired"):
        web.enter()
    web.leave(0)


def test_what_engines_are_told_of_a_caller(world: World) -> None:
    share = world.limited("weight = 2.5\nmax_slots = 4\nmax_waiting = 7").share
    assert (share.caller, share.weight, share.max_slots, share.max_waiting) == ("web", 2.5, 4, 7)
    share = world.limited("").share
    assert (share.caller, share.weight, share.max_slots, share.max_waiting) == ("web", 1.0, 0, 0)


def test_a_change_of_the_file_keeps_what_was_used(world: World) -> None:
    web = world.limited("requests_per_second = 1\nrequests_burst = 2\nmax_requests = 5")
    web.enter()
    web.enter()
    assert world.limited("requests_per_second = 1\nrequests_burst = 9\nmax_requests = 2") is web
    assert refusal(web).limit == "max_requests"
    web.leave(0)
    assert refusal(web).limit == "requests_per_second"
    world.seconds += 2
    web.enter()


def test_a_debt_outlives_a_change_of_the_file(world: World) -> None:
    web = world.limited("tokens_per_second = 10")
    web.read(1000)
    world.limited("tokens_per_second = 100")
    assert refusal(web).retry_after_seconds == pytest.approx(9.9, abs=0.01)


def test_a_caller_that_is_gone_finishes_what_it_has_and_starts_nothing(world: World) -> None:
    web = world.limited("")
    web.enter()
    world.write('[callers.shop]\ntoken = "0ther"')
    with pytest.raises(Unauthenticated):
        world.caller()
    with pytest.raises(Unauthenticated, match="not known any more"):
        web.enter()
    web.leave(5)
    assert world.count("requests_total", caller="web") is None
    assert world.count("requests_total", caller="shop") == 0


def test_several_tokens_are_one_caller(world: World) -> None:
    world.write('[callers.web]\ntoken = "s3cret"\ntokens = ["new"]')
    assert world.caller() is world.caller("new")


def test_everything_is_counted_for_its_caller(world: World) -> None:
    web = world.limited("max_requests = 1")
    web.enter()
    web.read(7)
    refusal(web)
    web.leave(11)
    assert world.count("requests_total", caller="web") == 1
    assert world.count("refusals_total", caller="web", limit="max_requests") == 1
    assert world.count("tokens_total", caller="web", kind="source") == 7
    assert world.count("tokens_total", caller="web", kind="generated") == 11
    assert world.count("requests_running", caller="web") == 0


def test_more_callers_than_there_are_labels_share_one(world: World) -> None:
    names = [f"c{i}" for i in range(MAX_CALLERS + 2)]
    world.write("".join(f'[callers.{name}]\ntoken = "{name}"\n' for name in names))
    for name in names:
        world.caller(name).enter()
    assert world.count("requests_total", caller="c0") == 1
    assert world.count("requests_total", caller=OTHERS) == 2
    assert world.count("requests_total", caller=names[-1]) is None
    world.write("".join(f'[callers.{name}]\ntoken = "{name}"\n' for name in [*names[1:], "new"]))
    assert world.count("requests_total", caller="c0") is None
    assert world.count("requests_total", caller="new") == 0
