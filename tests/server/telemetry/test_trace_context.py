import pytest

from dragoman.server.telemetry.trace_context import MAX_STATE_BYTES, MAX_STATE_MEMBERS, TraceContext, read_trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def parent(value: str | bytes) -> TraceContext | None:
    return read_trace_context((("user-agent", "x"), ("traceparent", value)))


def state(*values: str) -> str:
    context = read_trace_context((("traceparent", PARENT), *(("tracestate", value) for value in values)))
    assert context is not None
    return context.state


def test_no_metadata_or_no_parent_is_no_context() -> None:
    assert read_trace_context(None) is None
    assert read_trace_context(()) is None
    assert read_trace_context((("tracestate", "a=1"), ("x-request-id", PARENT))) is None


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
def test_parent_is_read_with_its_sampled_flag(flags: str, is_sampled: bool) -> None:
    assert parent(f"00-{TRACE}-{SPAN}-{flags}") == TraceContext(TRACE, SPAN, is_sampled)
    assert parent(f" 00-{TRACE}-{SPAN}-{flags} ") == TraceContext(TRACE, SPAN, is_sampled)


def test_later_versions_may_say_more_than_the_first() -> None:
    assert parent(f"01-{TRACE}-{SPAN}-01-what-comes") == TraceContext(TRACE, SPAN, True)
    assert parent(f"{PARENT}-more") is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-zz",
        f"01-{TRACE}-{SPAN}-01x",
        f"{PARENT}\n{PARENT}",
        PARENT.encode(),
        "٠٠-" + PARENT[3:],
    ],
)
def test_what_is_no_parent_is_not_there(value: str | bytes) -> None:
    assert parent(value) is None


def test_the_last_parent_counts() -> None:
    outer, inner = f"00-{'1' * 32}-{SPAN}-00", PARENT
    assert read_trace_context((("traceparent", outer), ("traceparent", inner))) == TraceContext(TRACE, SPAN, True)


def test_states_are_put_together() -> None:
    assert state("vendor=opaque value, other@system=1", "", "last=x;y") == "vendor=opaque value,other@system=1,last=x;y"


@pytest.mark.parametrize(
    "value",
    ["no member", "Upper=1", "a=1,a=2", "a=", "a=ü", "a=1,b", ",".join(f"k{i}=v" for i in range(MAX_STATE_MEMBERS + 1))],
)
def test_a_state_that_breaks_the_rules_is_dropped_and_the_parent_kept(value: str) -> None:
    assert state(value) == ""


def test_a_state_is_as_long_as_it_may_be() -> None:
    rest = "a=" + "v" * 200 + ",b=" + "v" * 200 + ",c="
    assert state(rest + "v" * (MAX_STATE_BYTES - len(rest)))
    assert not state(rest + "v" * (MAX_STATE_BYTES - len(rest) + 1))
