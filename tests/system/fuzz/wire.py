"""Protobuf's wire format, written by hand, so that messages can be made that no library would write."""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32 = range(6)
MAX_FIELD_NUMBER = 2**29 - 1
INTEGERS = (
    *(0, 1, 2, 3, 20, 21, 64, 65, 127, 256, 1000, 1001),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 10, 2**64 - 1),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-6, 0.5, 0.9, 10.0, 10.1, 100.0, 100.1, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    b"deu_Latn", b"DE-at", b"fr", b"zz", b"_-_",
    b"", b" ", b"\0", b"\r\n", b"a dog runs", b"alpha", b"liveness", b"../../etc/passwd", b"%s%n{0}", b"a" * 128, b"a" * 129,
    b"x " * 700,
    "é".encode(), "\u202e\u200b\ufeff".encode(), "\U0001f415".encode() * 9, "a\u0301".encode() * 50, b"\x7f",
    b"dragoman.v1.Generation",
    b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a dog\x80runs",
)  # fmt: skip
HUGE_SIZES = (5_000, 70_000, 1_000_000, 4 * 2**20 - 60)
_FLOATING = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}
_TEXTUAL = {FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE}


@dataclass(frozen=True, slots=True)
class Record:
    """A field as it travels: its number, its wire type, and what follows, a length included where the type has one."""

    number: int
    wire_type: int
    content: bytes

    def encode(self) -> bytes:
        """Return its bytes."""
        return varint(self.number << 3 | self.wire_type) + self.content


def varint(value: int) -> bytes:
    """Return a number in as few bytes as can be."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def delimited(content: bytes) -> bytes:
    """Return bytes with their number before them."""
    return varint(len(content)) + content


def records(message: Message) -> list[Record]:
    """Return the fields of a message, by number; repeated numbers are packed, repeated messages have a record each."""
    return [
        _record(field, one)
        for field, value in message.ListFields()
        for one in (value if field.is_repeated and field.message_type is not None else [value])
    ]


def _record(field: FieldDescriptor, value: object) -> Record:
    if field.is_repeated and field.message_type is None:  # of numbers: requests have no others
        return Record(field.number, BYTES, delimited(b"".join(map(varint, value))))  # type: ignore[call-overload]
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return Record(field.number, FIXED32, struct.pack("<f", value))
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return Record(field.number, FIXED64, struct.pack("<d", value))
    if isinstance(value, Message):
        return Record(field.number, BYTES, delimited(value.SerializeToString()))
    if isinstance(value, str | bytes):
        return Record(field.number, BYTES, delimited(value.encode() if isinstance(value, str) else value))
    assert isinstance(value, int)
    return Record(field.number, VARINT, varint(value % 2**64))


class Mutator:
    """Makes messages that are nearly right, all of them from one source of chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def mutate(self, message: Message) -> bytes:
        """Return the bytes of a message after one to three changes to its fields, and sometimes one to its bytes."""
        fields, descriptor = records(message), message.DESCRIPTOR
        others = (self._repeat, self._drop, self._retype, self._stray, self._shuffle)
        changes = (*[self._extreme] * 4, *others)
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            fields = self._chance.choice(changes)(fields, descriptor)
        data = b"".join(record.encode() for record in fields)
        return self._damage(data) if self._chance.random() < 0.15 else data

    def noise(self) -> bytes:
        """Return bytes that are no message of anything, but by chance."""
        return self._chance.randbytes(self._chance.choice((1, 2, 3, 5, 8, 40, 300)))

    def _extreme(self, fields: Sequence[Record], descriptor: Descriptor) -> list[Record]:
        """Set a field, there or not, to a value at an end of what it may be or beyond."""
        if not descriptor.fields:
            return self._stray(fields, descriptor)
        field = self._chance.choice(descriptor.fields)
        return [*(record for record in fields if record.number != field.number), self._value(field)]

    def _value(self, field: FieldDescriptor) -> Record:
        if field.message_type is not None:
            return Record(field.number, BYTES, delimited(self._text()))
        if field.is_repeated:
            count = self._chance.choice((1, 2, 255, 256, 257, 5_000))
            numbers = [self._chance.choice((*INTEGERS, self._chance.randrange(280))) for _ in range(min(count, 257))]
            packed = b"".join(map(varint, numbers)) * -(-count // 257)
            return Record(field.number, BYTES, delimited(packed))
        if field.cpp_type in _FLOATING:
            value = self._chance.choice((*FLOATS, self._chance.uniform(-20, 120)))
            is_single = field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT
            return Record(field.number, FIXED32 if is_single else FIXED64, struct.pack("<f" if is_single else "<d", value))
        if field.cpp_type in _TEXTUAL:
            return Record(field.number, BYTES, delimited(self._text()))
        return Record(field.number, VARINT, varint(self._chance.choice((*INTEGERS, self._chance.randrange(100)))))

    def _text(self) -> bytes:
        if self._chance.random() < 0.03:
            return self._chance.choice((b"a", b"a ", "\u00e9".encode(), b"\0"))[:2] * (self._chance.choice(HUGE_SIZES) // 2)
        if self._chance.random() < 0.2:
            return "".join(
                chr(self._chance.choice((self._chance.randrange(32, 127), self._chance.randrange(0xD800)))) for _ in range(20)
            ).encode()
        return self._chance.choice(TEXTS)

    def _repeat(self, fields: Sequence[Record], descriptor: Descriptor) -> list[Record]:
        """Give a field several times; the last counts."""
        if not fields:
            return self._stray(fields, descriptor)
        return [*fields, *[self._chance.choice(fields)] * self._chance.choice((1, 2, 1000))]

    def _drop(self, fields: Sequence[Record], _: Descriptor) -> list[Record]:
        return [record for record in fields if self._chance.random() < 0.5]

    def _shuffle(self, fields: Sequence[Record], _: Descriptor) -> list[Record]:
        return self._chance.sample(fields, len(fields))

    def _retype(self, fields: Sequence[Record], descriptor: Descriptor) -> list[Record]:
        """Change a field's wire type, with or without a content that suits it."""
        if not fields:
            return self._stray(fields, descriptor)
        victim = self._chance.choice(fields)
        wire_type = self._chance.randrange(8)
        content = self._chance.choice((victim.content, self._content(wire_type)))
        return [replace(record, wire_type=wire_type, content=content) if record is victim else record for record in fields]

    def _stray(self, fields: Sequence[Record], _: Descriptor) -> list[Record]:
        """Add a field that no message has, or none may have."""
        number = self._chance.choice((0, 17, 99, 19_000, MAX_FIELD_NUMBER, MAX_FIELD_NUMBER + 1))
        wire_type = self._chance.randrange(8)
        return [*fields, Record(number, wire_type, self._content(wire_type))]

    def _content(self, wire_type: int) -> bytes:
        match wire_type:
            case 0:
                return self._chance.choice((varint(self._chance.choice(INTEGERS)), b"\xff" * 9 + b"\x01", b"\xff" * 11))
            case 1:
                return self._chance.randbytes(8)
            case 2:
                return delimited(self._text())
            case 3:  # groups in groups: parsers have a depth at which they give up
                return varint(99 << 3 | START_GROUP) * self._chance.choice((0, 5, 200, 100_000))
            case 5:
                return self._chance.randbytes(4)
            case _:
                return b""

    def _damage(self, data: bytes) -> bytes:
        """Cut, flip, insert, or take out."""
        place = self._chance.randrange(len(data) + 1)
        match self._chance.randrange(4):
            case 0:
                return data[:place]
            case 1 if place < len(data):
                return data[:place] + bytes([data[place] ^ 1 << self._chance.randrange(8)]) + data[place + 1 :]
            case 2:
                return data[:place] + self._chance.randbytes(self._chance.randrange(1, 5)) + data[place:]
            case _:
                return data[:place] + data[place + self._chance.randrange(1, 5) :]
