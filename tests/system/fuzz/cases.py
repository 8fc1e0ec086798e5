"""What is sent to the server: every method there is, messages that are right, nearly right or noise, and how the call is treated.

A case depends on the seed and on its own number alone, so that one that failed can be made again without the others.
"""

import base64
import copy
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthListRequest
from grpc_reflection.v1alpha.reflection_pb2 import ExtensionRequest, ServerReflectionRequest

from dragoman.v1.generation_pb2 import GenerateBulkRequest, GenerateRequest, GetModelRequest, ListModelsRequest, ScoreRequest
from tests.system.fuzz.wire import mutate, noise

REQUEST_ID_KEY = "x-request-id"
UNKNOWN_METHODS = (
    "/dragoman.v1.Generation/Nothing", "/dragoman.v2.Generation/Generate", "/", "/a", "//", "/dragoman.v1.Generation/",
    "/dragoman.v1.Generation/generate", "/grpc.health.v1.Health/Nothing", "/" + "x" * 3000,
    "/grpc.reflection.v1.ServerReflection/Nothing",
)  # fmt: skip
TEXT = "a dog runs over the grass"
GENERATE = tuple(
    GenerateRequest(**{"text": TEXT, "max_new_tokens": 3} | fields)
    for fields in (
        {},
        {"model": "alpha", "num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
        {"do_sample": True, "seed": 7, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "num_return_sequences": 3},
        {"min_new_tokens": 1, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppressed_tokens": [5, 9]},
        {"forced_prefix": "a dog", "return_log_probs": True, "top_log_probs": 5, "priority": 2},
        {"source_language": "de-AT", "target_language": "FR", "forced_prefix": "a", "num_beams": 1},
        {"target_language": "deu_Latn", "min_new_tokens": 0, "early_stopping": False, "do_sample": False},
        {"text": TEXT * 40, "truncate": True, "return_alternatives": True, "num_return_sequences": 3},
    )
)
SCORE = tuple(
    ScoreRequest(**{"text": TEXT, "target": "a dog"} | fields)
    for fields in (
        {},
        {"model": "alpha", "return_alignment": True, "return_word_alignment": True, "alignment_layer": 1},
        {"target": "", "priority": -3, "length_penalty": 2.0},
        {"source_language": "DEU_latn", "target_language": "fr_FR", "return_word_alignment": True},
    )
)
REFLECTION = (
    ServerReflectionRequest(list_services=""),
    ServerReflectionRequest(file_containing_symbol="dragoman.v1.Generation"),
    ServerReflectionRequest(file_by_filename="dragoman/v1/generation.proto", host="localhost"),
    ServerReflectionRequest(file_containing_extension=ExtensionRequest(containing_type="dragoman.v1.Error", extension_number=3)),
    ServerReflectionRequest(all_extension_numbers_of_type="dragoman.v1.Model"),
)
SEEDS: Mapping[type[Message], tuple[Message, ...]] = {
    GenerateRequest: GENERATE,
    GenerateBulkRequest: (GenerateBulkRequest(requests=GENERATE[:3]), GenerateBulkRequest(requests=GENERATE[2:4])),
    ScoreRequest: SCORE,
    ListModelsRequest: (ListModelsRequest(),),
    GetModelRequest: (GetModelRequest(model="alpha"), GetModelRequest()),
    HealthCheckRequest: (HealthCheckRequest(), HealthCheckRequest(service="alpha"), HealthCheckRequest(service="liveness")),
    HealthListRequest: (HealthListRequest(),),
    ServerReflectionRequest: REFLECTION,
}
# How often a method is chosen; the rest have 1.
WEIGHTS = {"Generate": 8, "GenerateStream": 4, "GenerateBatch": 4, "GenerateBulk": 4, "Score": 5, "Check": 2}
METADATA_VALUES = (
    "", "a" * 128, "a" * 129, "a" * 3000, "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-00",
    "ff-x-y-z", "Bearer", "Bearer  ", "Bearer a b", "Basic !", "bearer " + "x" * 500, "gzip", "9" * 20, "-1", "1e309", "\\xff",
    "%00", "x",
)  # fmt: skip
METADATA_KEYS = (
    REQUEST_ID_KEY, "traceparent", "tracestate", "authorization", "x-forwarded-for", "accept-language",
    "grpc-previous-rpc-attempts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        number: Which of the seed's.
        path: Of the method.
        method: Its descriptor; None for one that no server has.
        messages: What is sent, in turn.
        is_as_meant: Whether nothing about it is wrong: such a call must be answered.
        is_half_closed: Whether the caller says that there is no more.
        metadata: What goes with it.
        timeout_seconds: Its deadline, None for none.
        cancel_seconds: When the caller cancels it, None for never.
        reads: How many answers are read at the most before the caller stops doing so and waits to cancel.
    """

    number: int
    path: str
    method: MethodDescriptor | None
    messages: tuple[bytes, ...]
    is_as_meant: bool
    is_half_closed: bool
    metadata: tuple[tuple[str, str], ...]
    timeout_seconds: float | None
    cancel_seconds: float | None
    reads: int

    @property
    def is_cut_short(self) -> bool:
        """Whether the caller may see it end before the server has answered."""
        return self.timeout_seconds is not None or self.cancel_seconds is not None

    def describe(self) -> str:
        """Return all there is to know, messages compressed: base64 of zlib."""
        messages = [base64.b64encode(zlib.compress(message, 9)).decode() for message in self.messages]
        treatment = f"half-closed {self.is_half_closed}, deadline {self.timeout_seconds}, cancelled after {self.cancel_seconds}"
        return f"case {self.number}: {self.path[:80]} {messages} metadata {self.metadata}, {treatment}, reads {self.reads}"


def methods(services: list[str]) -> dict[str, MethodDescriptor]:
    """Return what the server can be asked, by path; `services` is what it says it has."""
    found = (Default().FindServiceByName(name) for name in services)
    return {f"/{service.full_name}/{method.name}": method for service in found for method in service.methods}


def cases(seed: int, known: Mapping[str, MethodDescriptor], num_messages: int) -> Iterator[Case]:
    """Give cases that have so many messages together, or a few more."""
    number = 0
    while num_messages > 0:
        case = make_case(seed, number, known)
        yield case
        num_messages -= max(1, len(case.messages))
        number += 1


def make_case(seed: int, number: int, known: Mapping[str, MethodDescriptor]) -> Case:
    """Return one case."""
    chance = random.Random(f"{seed}/{number}")
    paths = [*known, *UNKNOWN_METHODS]
    weights = [WEIGHTS.get(known[path].name, 1) for path in known] + [1 / len(UNKNOWN_METHODS)] * len(UNKNOWN_METHODS)
    [path] = chance.choices(paths, weights)
    method = known.get(path)
    is_streamed = method is not None and method.client_streaming
    count = chance.choice((0, 1, 2, 5, 9)) if is_streamed else chance.choice((1,) * 60 + (0, 2))
    is_as_meant = method is not None and count > 0 and (is_streamed or count == 1) and chance.random() < 0.1
    messages = tuple(_message(chance, method, is_as_meant, f"{number}-{i}") for i in range(count))
    metadata: tuple[tuple[str, str], ...] = ()
    if not is_as_meant and chance.random() < 0.2:
        metadata = tuple(
            (chance.choice(METADATA_KEYS), chance.choice(METADATA_VALUES)) for _ in range(chance.choice((1, 1, 2, 40)))
        )
    is_watch = method is not None and method.name == "Watch"
    is_half_closed = is_as_meant or chance.random() < 0.95
    timeout, cancel = _treatment(chance, must_end=is_watch or not is_half_closed, may_end=not is_as_meant)
    reads = 2**31 if cancel is None else chance.choice((0, 1, 2**31))
    return Case(number, path, method, messages, is_as_meant and not is_watch, is_half_closed, metadata, timeout, cancel, reads)


def _treatment(chance: random.Random, *, must_end: bool, may_end: bool) -> tuple[float | None, float | None]:
    """Return a deadline and a moment to cancel at; a call that the server never ends gets one of them."""
    if not must_end and (not may_end or chance.random() < 0.7):
        return (None, None) if chance.random() < 0.7 else (30.0, None)
    if chance.random() < 0.5:
        return chance.choice((0.0, 0.001, 0.005, 0.02, 0.1)), None
    return None, chance.choice((0.0, 0.001, 0.003, 0.01, 0.05))


def _message(chance: random.Random, method: MethodDescriptor | None, is_as_meant: bool, request_id: str) -> bytes:
    """Return one message for a method: as meant, nearly so, another method's, or noise."""
    message: Message = copy.deepcopy(chance.choice(SEEDS[GetMessageClass(method.input_type)] if method is not None else GENERATE))
    if method is not None and method.name == "GenerateBatch":
        message.request_id = request_id  # type: ignore[attr-defined]
    for place, request in enumerate(getattr(message, "requests", ())):
        request.request_id = f"{request_id}-{place}"
    if is_as_meant:
        return message.SerializeToString()
    if chance.random() < 0.05:
        return noise(chance)
    if chance.random() < 0.03:
        message = chance.choice(chance.choice(tuple(SEEDS.values())))
    return mutate(chance, message)
