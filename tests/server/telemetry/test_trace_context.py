"""W3C trace context: which parents are valid, and which states are kept."""

import pytest

from dragoman.server.telemetry.trace_context import MAX_STATE_BYTES, MAX_STATE_MEMBERS, TraceContext, read_trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
LONG = "a=" + "v" * 200 + ",b=" + "v" * 200 + ",c="


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        *[(f"00-{TRACE}-{SPAN}-{flags}", sampled) for flags, sampled in (("00", False), ("02", False), ("03", True), ("ff", True))],
        (f" {PARENT} ", True),
        (f"01-{TRACE}-{SPAN}-01-what-comes", True),
        *[(bad, None) for bad in (f"{PARENT}-more", "", "00", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01")],
        *[(bad, None) for bad in (f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}0-01", f"00-{'0' * 32}-{SPAN}-01")],
        *[(bad, None) for bad in (f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-zz")],
        *[(bad, None) for bad in (f"01-{TRACE}-{SPAN}-01x", f"{PARENT}\n{PARENT}", PARENT.encode(), "٠٠-" + PARENT[3:])],
    ],
)
def test_a_parent_is_read_with_its_sampled_flag_or_not_at_all(value: str | bytes, is_sampled: bool | None) -> None:
    expected = None if is_sampled is None else TraceContext(TRACE, SPAN, is_sampled)
    assert read_trace_context((("user-agent", "x"), ("traceparent", value))) == expected


def test_the_last_parent_counts_and_there_may_be_none() -> None:
    outer = f"00-{'1' * 32}-{SPAN}-00"
    assert read_trace_context((("traceparent", outer), ("traceparent", PARENT))) == TraceContext(TRACE, SPAN, True)
    for metadata in (None, (), (("tracestate", "a=1"), ("x-request-id", PARENT))):
        assert read_trace_context(metadata) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            ("vendor=opaque value, other@system=1", "", "last=x;y"),
            "vendor=opaque value,other@system=1,last=x;y",
        ),
        *[((bad,), "") for bad in ("no member", "Upper=1", "a=1,a=2", "a=", "a=ü", "a=1,b")],
        ((",".join(f"k{i}=v" for i in range(MAX_STATE_MEMBERS + 1)),), ""),
        ((whole := LONG + "v" * (MAX_STATE_BYTES - len(LONG)),), whole),
        ((whole + "v",), ""),
    ],
)
def test_states_are_joined_or_dropped_without_their_parent(values: tuple[str, ...], expected: str) -> None:
    context = read_trace_context((("traceparent", PARENT), *(("tracestate", value) for value in values)))
    assert context is not None and context.state == expected
