"""Protobuf messages that are nearly right, in a wire format written by hand: no library would write some of them."""

import random
import struct
from collections.abc import Iterator
from typing import TypeAlias

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
    b"deu_Latn", b"DE-at", b"fr", b"zz", b"_-_", b"", b" ", b"\0", b"\r\n", b"a dog runs", b"alpha", b"liveness",
    b"../../etc/passwd", b"%s%n{0}", b"a" * 128, b"a" * 129, b"x " * 700, b"\x7f", b"dragoman.v1.Generation",
    "é".encode(), "\u202e\u200b\ufeff".encode(), "\U0001f415".encode() * 9, "a\u0301".encode() * 50,
    b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a dog\x80runs",
)  # fmt: skip
HUGE_SIZES = (5_000, 70_000, 1_000_000, 4 * 2**20 - 60)
CHANGES = (*["extreme"] * 4, "repeat", "drop", "retype", "stray", "shuffle")

Record: TypeAlias = tuple[int, int, bytes]
"""A field as it travels: its number, its wire type, and what follows, a length included where the type has one."""


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


def records(data: bytes) -> Iterator[Record]:
    """Give the fields of a message's bytes."""

    def number_at(place: int) -> tuple[int, int]:
        end = place
        while data[end] & 0x80:
            end += 1
        return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[place : end + 1])), end + 1

    end = 0
    while end < len(data):
        key, start = number_at(end)
        match key & 7:
            case 0:
                _, end = number_at(start)
            case 2:
                size, end = number_at(start)
                end += size
            case wire_type:
                end = start + (8 if wire_type == FIXED64 else 4)
        yield key >> 3, key & 7, data[start:end]


def mutate(chance: random.Random, message: Message) -> bytes:
    """Return the bytes of a message after one to three changes to its fields, and sometimes one to its bytes."""
    fields = list(records(message.SerializeToString()))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        fields = _changed(chance, fields, message.DESCRIPTOR)
    data = b"".join(varint(number << 3 | wire_type) + content for number, wire_type, content in fields)
    return _damaged(chance, data) if chance.random() < 0.15 else data


def noise(chance: random.Random) -> bytes:
    """Return bytes that are no message of anything, but by chance."""
    return chance.randbytes(chance.choice((1, 2, 3, 5, 8, 40, 300)))


def _changed(chance: random.Random, fields: list[Record], descriptor: Descriptor) -> list[Record]:
    """Set a field to an extreme, or repeat, drop, retype or shuffle some, or add one that no message has or may have."""
    change = chance.choice(CHANGES)
    if change == "extreme" and descriptor.fields:
        field = chance.choice(descriptor.fields)
        return [*(record for record in fields if record[0] != field.number), (field.number, *_value(chance, field))]
    if change == "drop":
        return [record for record in fields if chance.random() < 0.5]
    if change == "shuffle":
        return chance.sample(fields, len(fields))
    wire_type = chance.randrange(8)
    if change == "repeat" and fields:
        return [*fields, *[chance.choice(fields)] * chance.choice((1, 2, 1000))]
    if change == "retype" and fields:
        place = chance.randrange(len(fields))
        number, _, content = fields[place]
        fields[place] = number, wire_type, chance.choice((content, _content(chance, wire_type)))
        return fields
    number = chance.choice((0, 17, 99, 19_000, MAX_FIELD_NUMBER, MAX_FIELD_NUMBER + 1))
    return [*fields, (number, wire_type, _content(chance, wire_type))]


def _value(chance: random.Random, field: FieldDescriptor) -> tuple[int, bytes]:
    """Return a value at an end of what a field may be or beyond."""
    if field.cpp_type in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE):
        return BYTES, delimited(_text(chance))
    if field.is_repeated:
        count = chance.choice((1, 2, 255, 256, 257, 5_000))
        numbers = [chance.choice((*INTEGERS, chance.randrange(280))) for _ in range(min(count, 257))]
        return BYTES, delimited(b"".join(map(varint, numbers)) * -(-count // 257))
    number = chance.choice((*FLOATS, chance.uniform(-20, 120)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return FIXED32, struct.pack("<f", number)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return FIXED64, struct.pack("<d", number)
    return VARINT, varint(chance.choice((*INTEGERS, chance.randrange(100))))


def _text(chance: random.Random) -> bytes:
    match chance.random():
        case at if at < 0.03:
            return chance.choice((b"a", b"a ", "é".encode(), b"\0")) * (chance.choice(HUGE_SIZES) // 2)
        case at if at < 0.2:
            places = (chance.choice((chance.randrange(32, 127), chance.randrange(0xD800))) for _ in range(20))
            return "".join(map(chr, places)).encode()
        case _:
            return chance.choice(TEXTS)


def _content(chance: random.Random, wire_type: int) -> bytes:
    match wire_type:
        case 0:
            return chance.choice((varint(chance.choice(INTEGERS)), b"\xff" * 9 + b"\x01", b"\xff" * 11))
        case 2:
            return delimited(_text(chance))
        case 3:  # groups in groups: parsers have a depth at which they give up
            return varint(99 << 3 | START_GROUP) * chance.choice((0, 5, 200, 100_000))
        case _:
            return chance.randbytes({FIXED64: 8, FIXED32: 4}.get(wire_type, 0))


def _damaged(chance: random.Random, data: bytes) -> bytes:
    """Cut, flip, insert, or take out."""
    place = chance.randrange(len(data) + 1)
    before, after = data[:place], data[place:]
    kinds = (b"", bytes([after[0] ^ 1 << chance.randrange(8)]) + after[1:] if after else b"", after[chance.randrange(1, 5) :])
    return before + chance.choice((*kinds, chance.randbytes(chance.randrange(1, 5)) + after))
