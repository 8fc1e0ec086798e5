"""What a version of the contract takes from callers of an older one: descriptors compared, name by name and number by number."""

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto

FIELD_TYPES = {value: name.removeprefix("TYPE_").lower() for name, value in FieldDescriptorProto.Type.items()}
LABELS = {value: name.removeprefix("LABEL_").lower() for name, value in FieldDescriptorProto.Label.items()}


def breaks(old: FileDescriptorProto, new: FileDescriptorProto) -> list[str]:
    """Return what callers of the old contract lose with the new one, a sentence each; none if it only adds.

    Names of fields and of enum values count as numbers do: they are what JSON, text and generated code go by. A field may become
    `optional`: whoever knows it as always there reads and writes the same bytes. Not the other way round: nobody could then say
    that it is not there.
    """
    return list(_breaks(old, new))


def _breaks(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    for aspect in ("package", "syntax"):
        if getattr(old, aspect) != getattr(new, aspect):
            yield f"{aspect} {getattr(old, aspect)} became {getattr(new, aspect)}"
    yield from _types(old.package, old, new)
    for service, successor in _pairs(old.service, new.service):
        if successor is None:
            yield f"{old.package}.{service.name}: removed"
            continue
        for method, other in _pairs(service.method, successor.method):
            name = f"{old.package}.{service.name}.{method.name}"
            if other is None:
                yield f"{name}: removed"
                continue
            for aspect in ("input_type", "output_type", "client_streaming", "server_streaming"):
                yield from _change(name, aspect, getattr(method, aspect), getattr(other, aspect))


def _types(scope: str, old: Any, new: Any) -> Iterator[str]:
    """Compare the messages and enums of a file or of a message."""
    messages = "message_type" if isinstance(old, FileDescriptorProto) else "nested_type"
    for message, successor in _pairs(getattr(old, messages), getattr(new, messages)):
        name = f"{scope}.{message.name}"
        if successor is None:
            yield f"{name}: removed"
        else:
            yield from _fields(name, message, successor)
            yield from _types(name, message, successor)
    for enum, successor in _pairs(old.enum_type, new.enum_type):
        name = f"{scope}.{enum.name}"
        if successor is None:
            yield f"{name}: removed"
        else:
            yield from _values(name, enum, successor)


def _fields(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    successors = {field.number: field for field in new.field}
    numbers = {field.number for field in old.field}
    for field in old.field:
        where = f"{name}.{field.name} = {field.number}"
        successor = successors.get(field.number)
        if successor is None:
            yield f"{where}: removed"
            continue
        before, after = _aspects(old, field), _aspects(new, successor)
        if after["optional"] and not before["optional"] and before["label"] == "optional" and before["oneof"] is None:
            before["optional"] = True
        for aspect, value in before.items():
            yield from _change(where, aspect, value, after[aspect])
    for field in new.field:
        if field.number in numbers:
            continue
        where = f"{name}.{field.name} = {field.number}"
        if any(span.start <= field.number < span.end for span in old.reserved_range) or field.name in old.reserved_name:
            yield f"{where}: was reserved"
        if field.label == FieldDescriptorProto.LABEL_REQUIRED:
            yield f"{where}: is new and required"
    yield from _reserved(name, old, new)


def _aspects(message: DescriptorProto, field: FieldDescriptorProto) -> dict[str, object]:
    """Return what callers rely on in a field besides its number; a oneof that the compiler made of `optional` is none."""
    is_in_oneof = field.HasField("oneof_index") and not field.proto3_optional
    return {
        "name": field.name,
        "type": FIELD_TYPES[field.type],
        "type_name": field.type_name,
        "label": LABELS[field.label],
        "optional": field.proto3_optional,
        "oneof": message.oneof_decl[field.oneof_index].name if is_in_oneof else None,
        "json_name": field.json_name,
        "default": field.default_value,
    }


def _values(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    numbers = {value.name: value.number for value in new.value}
    for value in old.value:
        where = f"{name}.{value.name} = {value.number}"
        if value.name not in numbers:
            yield f"{where}: removed"
        else:
            yield from _change(where, "number", value.number, numbers[value.name])
    known = {value.name for value in old.value}
    for value in new.value:
        is_reserved = any(span.start <= value.number <= span.end for span in old.reserved_range) or value.name in old.reserved_name
        if value.name not in known and is_reserved:
            yield f"{name}.{value.name} = {value.number}: was reserved"
    yield from _reserved(name, old, new)


def _reserved(name: str, old: Any, new: Any) -> Iterator[str]:
    """What was reserved stays so: it was given up for good."""
    for span in old.reserved_range:
        if not any(other.start <= span.start and span.end <= other.end for other in new.reserved_range):
            yield f"{name}: the numbers from {span.start} are reserved no more"
    for word in old.reserved_name:
        if word not in new.reserved_name:
            yield f"{name}: {word} is reserved no more"


def _change(where: str, aspect: str, before: object, after: object) -> Iterator[str]:
    if before != after:
        yield f"{where}: {aspect} {before} became {after}"


def _pairs(old: Sequence[Any], new: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pair what is old with what has its name now, or None."""
    successors = {thing.name: thing for thing in new}
    return ((thing, successors.get(thing.name)) for thing in old)
