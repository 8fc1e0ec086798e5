"""Parser of W3C Trace Context (https://www.w3.org/TR/trace-context/) in gRPC metadata, without OpenTelemetry."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

PARENT_KEY = "traceparent"
STATE_KEY = "tracestate"
MAX_STATE_BYTES = 512
MAX_STATE_MEMBERS = 32

# Version 00 ends here; later versions may continue after a dash.
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A caller's span; ids in hexadecimal, `state` is the value of `tracestate`."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""


def read_trace_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext | None:
    """Return the trace context in a call's metadata, None without; of several the last, which instrumentation appended."""
    parent: str | bytes = ""
    states: list[str | bytes] = []
    for key, value in metadata or ():
        if key == PARENT_KEY:
            parent = value
        elif key == STATE_KEY:
            states.append(value)
    if not parent or not isinstance(parent, str) or (match := _PARENT.fullmatch(parent.strip())) is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _read_state(states) if states else "")


def _read_state(values: list[str | bytes]) -> str:
    members = [member.strip() for value in values if isinstance(value, str) for member in value.split(",") if member.strip()]
    keys = {member.partition("=")[0] for member in members}
    state = ",".join(members)
    is_sound = len(keys) == len(members) <= MAX_STATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return state if is_sound and len(state) <= MAX_STATE_BYTES else ""
