"""A request for inference as the core takes it: a request for each of its texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.server.core.requests import GenerateRequest
from dragoman.server.core.validation import check_model_name, check_model_version
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.counted import BulkEnvelope
from dragoman.server.faces.large_requests import both_ends
from dragoman.server.faces.oip.asked import Asked, Wanted
from dragoman.server.faces.oip.fields import check_datatype, to_text
from dragoman.server.faces.oip.given import EXCLUDE_INPUT, NAMED, PARAMETERS, SAMPLING_PARAMETERS, STREAM, TIMEOUT, Given
from dragoman.server.faces.oip.outputs import OUTPUTS
from dragoman.server.faces.oip.tensors import Tensor, read_tensors, shown

TEXT_INPUT = "text_input"
INPUTS = (TEXT_INPUT, SAMPLING_PARAMETERS, *NAMED)
NUM_PARAMETERS = len(NAMED) + len(PARAMETERS) + 1
MAX_TEXTS = 1024
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Inference(BulkEnvelope):
    """What a message asks for.

    Attributes:
        request_id: Its id; empty if it has none.
        requests: One for each text, in their order.
        outputs: Names of those that are wanted; empty for all that there is something to say in.
        has_rows: Whether each text is a row of its own, so that the shape is [N, 1] and not [N].
        is_streamed: Whether the answer is wanted in pieces; None where the message does not say.
        timeout_seconds: From its arrival; None for any time.
        num_bytes: Of the message.
    """

    request_id: str
    requests: Sequence[GenerateRequest]
    outputs: Sequence[str]
    has_rows: bool
    is_streamed: bool | None
    timeout_seconds: float | None
    num_bytes: int

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.requests)

    def ByteSize(self) -> int:
        """Return the bytes that count for it while it is served."""
        return self.num_bytes


def check_counts(num_inputs: int, num_outputs: int, num_parameters: int) -> None:
    """Do nothing if a message has no more of anything than there are names; to be asked before anything is made of it.

    Raises:
        InvalidRequest: If it has.
    """
    for name, number, most in (
        ("parameters", num_parameters, NUM_PARAMETERS),
        ("outputs", num_outputs, len(OUTPUTS)),
        ("inputs", num_inputs, len(INPUTS)),
    ):
        if number > most:
            raise InvalidRequest(name, f"{number}; there are {most} names at the most")


def to_inference(asked: Asked, num_bytes: int, max_characters: int | None = None) -> Inference:
    """Return what a message asks for.

    Args:
        asked: It, with no more of anything than `check_counts` lets through.
        num_bytes: Its size.
        max_characters: Of each end of a text that are kept; None for all.

    Raises:
        InvalidRequest: If it cannot be understood.
    """
    name, version = check_model_name(asked.model), check_model_version(asked.version)
    outputs = _outputs(asked.outputs)
    tensors = read_tensors(asked.inputs, INPUTS, MAX_TEXTS)
    if TEXT_INPUT not in tensors:
        raise InvalidRequest(TEXT_INPUT, "is missing")
    source = tensors.pop(TEXT_INPUT)
    texts = _texts(source)
    given = Given(len(texts))
    for key, parameter in asked.parameters.items():
        given.add_parameter(key, parameter)
    for tensor in tensors.values():
        given.add_tensor(tensor)
    is_streamed, timeout = given.take(STREAM), given.take(TIMEOUT)
    if given.take(EXCLUDE_INPUT) is False:
        raise InvalidRequest(EXCLUDE_INPUT, "false; what goes in is never part of what comes out")
    for key in PARAMETERS:
        given.take(key)
    if timeout is not None and timeout < 0:
        raise InvalidRequest(TIMEOUT, f"{timeout} microseconds")
    requests = [
        GenerateRequest(model=name, model_version=version, **_cut(given.shared | own | {"text": text}, max_characters))
        for text, own in zip(texts, given.each, strict=True)
    ]
    if len({request.num_return_sequences for request in requests}) > 1:
        raise InvalidRequest("num_return_sequences", "has to be the same for all texts")
    seconds = timeout / MICROSECONDS if timeout else None
    return Inference(asked.request_id, requests, outputs, len(source.shape) > 1, is_streamed, seconds, num_bytes)


def _outputs(wanted: Sequence[Wanted]) -> tuple[str, ...]:
    """Return the names of the outputs that are wanted."""
    names: dict[str, None] = {}
    for output in wanted:
        if output.name not in OUTPUTS:
            raise InvalidRequest("outputs", f"{shown(output.name)} is not known; there are {', '.join(OUTPUTS)}")
        if output.name in names:
            raise InvalidRequest("outputs", f"{output.name} is asked for twice")
        for key in output.parameters:
            raise InvalidRequest(output.name, f"parameter {shown(key)} of an output is not known")
        names[output.name] = None
    return tuple(names)


def _texts(tensor: Tensor) -> list[str]:
    """Return the texts."""
    check_datatype(TEXT_INPUT, "text", tensor.datatype)
    if tensor.shape[1:] not in ((), (1,)):
        raise InvalidRequest(TEXT_INPUT, f"its shape is {list(tensor.shape)}; it has to be [N] or [N, 1]")
    if not tensor.elements:
        raise InvalidRequest(TEXT_INPUT, "has no text")
    return [to_text(f"{TEXT_INPUT}[{number}]", element) for number, element in enumerate(tensor.elements)]


def _cut(values: dict[str, Any], max_characters: int | None) -> dict[str, Any]:
    """Return values of which no text has more than twice so many characters: those of both its ends."""
    if max_characters is None:
        return values
    return {name: both_ends(value, max_characters) if isinstance(value, str) else value for name, value in values.items()}
