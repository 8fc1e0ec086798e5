"""Calls of every method, with messages that are right, nearly right or noise, some in a form that no library would write.

A case depends on the seed and on its own number alone, so that one that failed can be made again without the others.
"""

import base64
import copy
import random
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthListRequest
from grpc_reflection.v1alpha.reflection_pb2 import ExtensionRequest, ServerReflectionRequest

from dragoman.v1.generation_pb2 import GenerateBulkRequest, GenerateRequest, GetModelRequest, ListModelsRequest, ScoreRequest

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
        {"terms": [{"source": "dog", "targets": ["a", "cat"]}, {"source": "the", "case_sensitive": True}], "glossary": ""},
    )
)
SEEDS: Mapping[type[Message], tuple[Message, ...]] = {
    GenerateRequest: GENERATE,
    GenerateBulkRequest: (GenerateBulkRequest(requests=GENERATE[:3]), GenerateBulkRequest(requests=GENERATE[2:4])),
    ScoreRequest: tuple(
        ScoreRequest(**{"text": TEXT, "target": "a dog"} | fields)
        for fields in (
            {},
            {"model": "alpha", "return_alignment": True, "return_word_alignment": True, "alignment_layer": 1},
            {"target": "", "priority": -3, "length_penalty": 2.0},
            {"source_language": "DEU_latn", "target_language": "fr_FR", "return_word_alignment": True},
        )
    ),
    ListModelsRequest: (ListModelsRequest(),),
    GetModelRequest: (GetModelRequest(model="alpha"), GetModelRequest()),
    HealthCheckRequest: (HealthCheckRequest(), HealthCheckRequest(service="alpha"), HealthCheckRequest(service="liveness")),
    HealthListRequest: (HealthListRequest(),),
    ServerReflectionRequest: (
        ServerReflectionRequest(list_services=""),
        ServerReflectionRequest(file_containing_symbol="dragoman.v1.Generation"),
        ServerReflectionRequest(file_by_filename="dragoman/v1/generation.proto", host="localhost"),
        ServerReflectionRequest(
            file_containing_extension=ExtensionRequest(containing_type="dragoman.v1.Error", extension_number=3)
        ),
        ServerReflectionRequest(all_extension_numbers_of_type="dragoman.v1.Model"),
    ),
}
# Weights of methods; the rest have 1.
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
VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32 = range(6)
INTEGERS = (
    *(0, 1, 2, 3, 20, 21, 64, 65, 127, 256, 1000, 1001),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 10, 2**64 - 1),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-6, 0.5, 0.9, 10.0, 10.1, 100.0, 100.1, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    b"deu_Latn", b"DE-at", b"fr", b"zz", b"_-_", b"", b" ", b"\0", b"\r\n", b"a dog runs", b"alpha", b"liveness",
    b"../../etc/passwd", b"%s%n{0}", b"a" * 128, b"a" * 129, b"x " * 700, b"\x7f", b"dragoman.v1.Generation",
    "é".encode(), "\u202e\u200b\ufeff".encode(), "\U0001f415".encode() * 9, "a\u0301".encode() * 50,
    b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a dog\x80runs",
)  # fmt: skip
HUGE_SIZES = (5_000, 70_000, 1_000_000, 4 * 2**20 - 60)


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    `method` is None for one that no server has. A call that `is_as_meant` has nothing wrong about it and must be answered.
    `is_half_closed` tells whether the caller ends the stream. After so many `reads` it reads no more and waits to cancel.
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
    def name(self) -> str:
        return "" if self.method is None else self.method.name

    def describe(self) -> str:
        """Return all there is to know, messages compressed: base64 of zlib."""
        messages = [base64.b64encode(zlib.compress(message, 9)).decode() for message in self.messages]
        treatment = f"half-closed {self.is_half_closed}, deadline {self.timeout_seconds}, cancelled after {self.cancel_seconds}"
        return f"case {self.number}: {self.path[:80]} {messages} metadata {self.metadata}, {treatment}, reads {self.reads}"


def methods(services: list[str]) -> dict[str, MethodDescriptor]:
    found = (Default().FindServiceByName(name) for name in services)
    return {f"/{service.full_name}/{method.name}": method for service in found for method in service.methods}


def cases(seed: int, known: Mapping[str, MethodDescriptor], num_messages: int) -> Iterator[Case]:
    number = 0
    while num_messages > 0:
        case = make_case(seed, number, known)
        yield case
        num_messages -= max(1, len(case.messages))
        number += 1


def make_case(seed: int, number: int, known: Mapping[str, MethodDescriptor]) -> Case:
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
        pairs = range(chance.choice((1, 1, 2, 40)))
        metadata = tuple((chance.choice(METADATA_KEYS), chance.choice(METADATA_VALUES)) for _ in pairs)
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
        return chance.randbytes(chance.choice((1, 2, 3, 5, 8, 40, 300)))
    if chance.random() < 0.03:
        message = copy.deepcopy(chance.choice(chance.choice(tuple(SEEDS.values()))))
    return _mutated(chance, message)


def _mutated(chance: random.Random, message: Message) -> bytes:
    """Return the bytes of a message that lacks fields or has more: of what comes twice, parsers keep the last, or both."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.05:
            message.ClearField(field.name)
    parts = [message.SerializeToString()]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        parts += [_record(chance, message.DESCRIPTOR)] * chance.choice((1,) * 20 + (2, 1000))
    data = b"".join(chance.sample(parts, len(parts)) if chance.random() < 0.1 else parts)
    if chance.random() >= 0.15:
        return data
    place = chance.randrange(len(data) + 1)
    before, after = data[:place], data[place:]
    flipped = bytes([after[0] ^ 1 << chance.randrange(8)]) + after[1:] if after else b""
    return before + chance.choice((b"", flipped, after[chance.randrange(1, 5) :], chance.randbytes(chance.randrange(1, 5)) + after))


def _record(chance: random.Random, descriptor: Descriptor) -> bytes:
    """Return a field at an end of what it may be or beyond, or one of a wrong type, or one that no message has or may have."""
    known = [field.number for field in descriptor.fields] or [1]
    if descriptor.fields and chance.random() < 0.5:
        field = chance.choice(descriptor.fields)
        number, (wire_type, content) = field.number, _extreme(chance, field)
    else:
        number = chance.choice((chance.choice(known), chance.choice((0, 17, 99, 19_000, 2**29 - 1, 2**29))))
        wire_type = chance.randrange(8)
        content = _content(chance, wire_type)
    return _varint(number << 3 | wire_type) + content


def _extreme(chance: random.Random, field: FieldDescriptor) -> tuple[int, bytes]:
    if field.cpp_type in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE):
        return BYTES, _delimited(_text(chance))
    if field.is_repeated:
        count = chance.choice((1, 2, 255, 256, 257, 5_000))
        numbers = [chance.choice((*INTEGERS, chance.randrange(280))) for _ in range(min(count, 257))]
        return BYTES, _delimited(b"".join(map(_varint, numbers)) * -(-count // 257))
    number = chance.choice((*FLOATS, chance.uniform(-20, 120)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return FIXED32, struct.pack("<f", number)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return FIXED64, struct.pack("<d", number)
    return VARINT, _varint(chance.choice((*INTEGERS, chance.randrange(100))))


def _content(chance: random.Random, wire_type: int) -> bytes:
    if wire_type == VARINT:
        return chance.choice((_varint(chance.choice(INTEGERS)), b"\xff" * 9 + b"\x01", b"\xff" * 11))
    if wire_type == BYTES:
        return _delimited(_text(chance))
    if wire_type == START_GROUP:  # groups in groups: parsers have a depth at which they give up
        return _varint(99 << 3 | START_GROUP) * chance.choice((0, 5, 200, 100_000))
    return chance.randbytes({FIXED64: 8, FIXED32: 4}.get(wire_type, 0))


def _text(chance: random.Random) -> bytes:
    at = chance.random()
    if at < 0.03:
        return chance.choice((b"a", b"a ", "é".encode(), b"\0")) * (chance.choice(HUGE_SIZES) // 2)
    if at < 0.2:
        return "".join(chr(chance.choice((chance.randrange(32, 127), chance.randrange(0xD800)))) for _ in range(20)).encode()
    return chance.choice(TEXTS)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _delimited(content: bytes) -> bytes:
    return _varint(len(content)) + content
