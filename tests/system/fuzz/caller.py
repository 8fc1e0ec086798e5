"""Sends cases as bytes, several at once, and tells how each ended.

Calls are made from threads: gRPC's asyncio client invents a status of its own for a stream that ends while it is written to.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc

from tests.system.fuzz.cases import Case
from tests.system.fuzz.oracle import Ending

# Far longer than any case takes, on however busy a machine: a call that has not ended by then never does.
END_SECONDS = 200.0
NUM_AT_ONCE = 16
NUM_CHANNELS = 3
OPTIONS = (
    ("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
)  # fmt: skip


def send(address: str, cases: Iterable[Case]) -> list[tuple[Case, Ending]]:
    """Send all of them; return how each ended, in the order of ending."""
    endings: list[tuple[Case, Ending]] = []
    waiting, lock = iter(cases), threading.Lock()

    def send_in_turn(channel: grpc.Channel) -> None:
        while True:
            with lock:
                case = next(waiting, None)
            if case is None:
                return
            endings.append((case, _perform(channel, case)))

    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address, OPTIONS)) for _ in range(NUM_CHANNELS)]
        pool = stack.enter_context(ThreadPoolExecutor(NUM_AT_ONCE))
        for future in [pool.submit(send_in_turn, channels[i % NUM_CHANNELS]) for i in range(NUM_AT_ONCE)]:
            future.result()
    return endings


def _perform(channel: grpc.Channel, case: Case) -> Ending:
    """Make one call. On the wire all kinds are the same, so that a unary method can be sent no message, or two."""
    is_over = threading.Event()
    is_late = False
    if len(case.messages) == 1 and case.is_half_closed:
        call: Any = channel.unary_stream(case.path)(case.messages[0], case.timeout_seconds, case.metadata)
    else:
        call = channel.stream_stream(case.path)(_outgoing(case, is_over), case.timeout_seconds, case.metadata)

    def give_up() -> None:
        nonlocal is_late
        is_late = case.cancel_seconds is None
        call.cancel()

    timer = threading.Timer(END_SECONDS if case.cancel_seconds is None else case.cancel_seconds, give_up)
    timer.start()
    answers: list[bytes] = []
    try:
        while len(answers) < case.reads:
            answers.append(next(call))
    except (StopIteration, grpc.RpcError):
        pass  # the code says how
    code, details = call.code(), call.details()
    timer.cancel()
    is_over.set()
    return Ending(None if is_late else code, details or "", tuple(answers))


def _outgoing(case: Case, is_over: threading.Event) -> Iterator[bytes]:
    yield from case.messages
    if not case.is_half_closed:
        is_over.wait()
