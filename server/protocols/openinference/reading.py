"""How `ModelInferRequest` is read: what cannot be understood is refused in its place, and of the message itself nothing is kept."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.grpc.reading import CANNOT_BE_PARSED, Refused, note_large
from dragoman.server.protocols.openinference.requests import Inference, check_counts, to_inference
from dragoman.server.protocols.openinference.tensors import Asked, Datatype, Input, Wanted, from_contents, from_raw, shown
from dragoman.server.service.context import check_request_id

# Parameters of the protocol's REST side, which KServe's client sends over gRPC as well.
OF_REST = ("binary_data", "binary_data_output", "binary_data_size")


def infer_reader(deserialise: Callable[[bytes], Any], max_characters: Callable[[], int]) -> Callable[[bytes], Inference | Refused]:
    """Return what reads a message; arguments as those of `reader` of gRPC's own services."""

    def read(data: bytes) -> Inference | Refused:
        longest = max_characters() if note_large(data) else None
        request_id = ""
        try:
            message = deserialise(data)
            request_id = check_request_id("id", message.id)
            return to_inference(to_asked(message), len(data), longest)
        except DecodeError:
            return Refused(InvalidRequest("request", CANNOT_BE_PARSED))
        except InvalidRequest as error:
            return Refused(error.with_traceback(None), request_id)  # whose frames have all of the message

    return read


def to_asked(message: inference_pb2.ModelInferRequest) -> Asked:
    """Return what a message says.

    Args:
        message: It; its id has been checked.

    Raises:
        InvalidRequest: If it says more than there are names for, or its contents do not go with its inputs.
    """
    num_inputs, num_raw = len(message.inputs), len(message.raw_input_contents)
    check_counts(num_inputs, len(message.outputs), len(message.parameters))
    if num_raw and num_raw != num_inputs:
        raise InvalidRequest("raw_input_contents", f"{num_raw} for {num_inputs} inputs; all of them have one, or none has")
    raws: Sequence[bytes | None] = message.raw_input_contents if num_raw else [None] * num_inputs
    return Asked(
        message.id,
        message.model_name,
        message.model_version,
        {key: _value(key, parameter) for key, parameter in message.parameters.items() if key not in OF_REST},
        [_input(given, raw) for given, raw in zip(message.inputs, raws, strict=True)],
        [Wanted(output.name, _grpc(output.parameters)) for output in message.outputs],
    )


def _input(given: inference_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Input:
    def content(datatype: Datatype, count: int) -> Sequence[Any]:
        if raw is None:
            return from_contents(given.name, datatype, given.contents, count)
        if given.HasField("contents"):
            raise InvalidRequest(given.name, "its content is in raw_input_contents and in contents; one of them is enough")
        return from_raw(given.name, datatype, raw, count)

    return Input(given.name, given.datatype, given.shape, _grpc(given.parameters), content)


def _grpc(parameters: Iterable[str]) -> tuple[str, ...]:
    return tuple(key for key in parameters if key not in OF_REST)


def _value(name: str, parameter: inference_pb2.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidRequest("parameters", f"{shown(name)} has no value that is known")
    return getattr(parameter, choice)
