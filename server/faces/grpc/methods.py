"""How the calls of each RPC are treated; services declare it, interceptors read it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from dragoman.server.faces.grpc.reading import reader
from dragoman.server.faces.grpc.several import bulk_parser
from dragoman.v1 import generation_pb2

Read: TypeAlias = Callable[[bytes], Any]
# Makes what reads a message of what gRPC would read it with, and of what says how many characters of a text a model could use.
MakeRead: TypeAlias = Callable[[Read, Callable[[], int]], Read]


@dataclass(frozen=True, slots=True)
class Method:
    """How the calls of an RPC are treated.

    Attributes:
        is_probe: Whether they are neither recorded nor refused, and need no caller: probes must be answered while the server
            drains, and would fill the log.
        is_awaited: Whether a drain waits for them: for requests, and for what is asked about models. Whatever else is open is no
            work of anybody's.
        is_counted: Whether the metrics know of them: they generate or score.
        reader: Makes what reads their messages.
    """

    is_probe: bool = False
    is_awaited: bool = False
    is_counted: bool = False
    reader: MakeRead = reader


Methods: TypeAlias = Mapping[str, Method]

OTHER = Method()
PROBE = Method(is_probe=True)
QUESTION = Method(is_awaited=True)
REQUEST = Method(is_awaited=True, is_counted=True)


def declared(service: ServiceDescriptor, usual: Method, **others: Method) -> dict[str, Method]:
    """Return how the RPCs of a service are treated, by their full names.

    Args:
        service: What has them.
        usual: How most of them are.
        others: How the others are, by their names.
    """
    names = [method.name for method in service.methods]
    assert others.keys() <= set(names)
    return {f"/{service.full_name}/{name}": others.get(name, usual) for name in names}


def _read_bulk(_: Read, max_characters: Callable[[], int]) -> Read:
    return bulk_parser(reader(generation_pb2.GenerateRequest.FromString, max_characters))


GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
# What is not among them is as `OTHER`.
OWN_METHODS: Methods = {
    **declared(
        GENERATION,
        QUESTION,
        Generate=REQUEST,
        GenerateStream=REQUEST,
        GenerateBatch=REQUEST,
        GenerateBulk=Method(is_awaited=True, is_counted=True, reader=_read_bulk),
        Score=REQUEST,
    ),
    **declared(HEALTH, PROBE),
}
