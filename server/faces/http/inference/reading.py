"""Requests of the Open Inference Protocol's REST: JSON, with tensors in it or as bytes behind it, and Triton's shorter form."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Struct

from dragoman.inference import inference_pb2
from dragoman.server.core.ids import check_request_id
from dragoman.server.core.text_work import on_thread
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.counted import BulkEnvelope
from dragoman.server.faces.http.inference.writing import BINARY, JSON, LENGTH_KEY
from dragoman.server.faces.http.origins import Origins
from dragoman.server.faces.http.reading import decode
from dragoman.server.faces.http.statuses import HttpRefusal
from dragoman.server.faces.large_requests import LARGE_BYTES
from dragoman.server.faces.oip.asked import Asked, Input, Wanted
from dragoman.server.faces.oip.datatypes import Datatype, from_raw, from_values
from dragoman.server.faces.oip.inference import TEXT_INPUT, Inference, check_counts, to_inference
from dragoman.server.faces.oip.tensors import shown

BINARY_OUTPUT, BINARY_DATA, BINARY_SIZE = "binary_data_output", "binary_data", "binary_data_size"
# Digits of a length of a body.
MAX_LENGTH_DIGITS = 10

Dimension = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Tensor(Struct, forbid_unknown_fields=True):
    name: str
    shape: list[Dimension]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Any = UNSET


class _Output(Struct, forbid_unknown_fields=True):
    name: str
    parameters: dict[str, Any] | None = None


class _Infer(Struct, forbid_unknown_fields=True):
    inputs: list[_Tensor]
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] | None = None
    id: str | None = None
    model_name: str | None = None  # KServe's client says it again


class _Index(Struct, forbid_unknown_fields=True):
    ready: bool = False
    repository_name: str = ""


class Posted(BulkEnvelope):
    """A request as it was read.

    Attributes:
        inference: What it asks for.
    """

    __slots__ = ("_binary", "_is_binary_else", "inference")

    def __init__(self, inference: Inference, binary: dict[str, bool] | None = None, is_binary_else: bool = False) -> None:
        """Hold a request.

        Args:
            inference: What it asks for.
            binary: Whether outputs are wanted as bytes, of those that say so.
            is_binary_else: Whether the others are.
        """
        self.inference = inference
        self._binary, self._is_binary_else = binary or {}, is_binary_else

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.inference)

    @property
    def request_id(self) -> str:
        """Its id; empty if it has none."""
        return self.inference.request_id

    def is_binary(self, name: str) -> bool:
        """Whether an output is wanted as bytes."""
        return self._binary.get(name, self._is_binary_else)


class Reader:
    """Reads bodies."""

    def __init__(self, max_characters: Callable[[], int], origins: Origins) -> None:
        """Read what pages of some origins send, and whoever is no page.

        Args:
            max_characters: Says how many characters of a text a model could use; of a large request no more are kept.
            origins: Whose pages may send what a browser sends without asking first.
        """
        self._max_characters, self._origins = max_characters, origins

    async def infer(self, request: web.Request, body: bytes) -> Posted:
        """Return a request for inference.

        Raises:
            InvalidRequest: If it cannot be understood.
            HttpRefusal: If a page sends it that may not.
        """
        said = request.headers.get(LENGTH_KEY)
        return await self._read(request, body, lambda model, longest: _read_infer(body, said, model, longest))

    async def generate(self, request: web.Request, body: bytes) -> Posted:
        """Return a request in Triton's shorter form; errors as `infer`."""
        return await self._read(request, body, lambda model, longest: _read_generate(body, model, longest))

    async def index(self, request: web.Request, body: bytes) -> inference_pb2.RepositoryIndexRequest:
        """Return a request for the index; an empty body asks for all of it. Errors as `infer`."""
        self._check(request)
        asked = decode(body, _Index) if body else _Index()
        return inference_pb2.RepositoryIndexRequest(ready=asked.ready, repository_name=asked.repository_name)

    async def _read(self, request: web.Request, body: bytes, read: Callable[[tuple[str, str], int | None], Posted]) -> Posted:
        self._check(request)
        model = request.match_info["model"], request.match_info.get("version", "")
        if len(body) <= LARGE_BYTES:
            return read(model, None)
        return await on_thread(read, model, self._max_characters())

    def _check(self, request: web.Request) -> None:
        # Triton's client does not say what its body is, and curl says that it is a form. Of such a request, unlike of one that
        # says JSON or bytes, a browser does not ask first whether a page of another origin may send it.
        is_said = "Content-Type" in request.headers and request.content_type in (JSON, BINARY)
        if not is_said and not self._origins.is_trusted(request):
            raise HttpRefusal(HTTPStatus.FORBIDDEN, "Origin: pages of other origins may send this if http_allowed_origins has them")


def _read_infer(body: bytes, said: str | None, model: tuple[str, str], longest: int | None) -> Posted:
    head = _head_length(said, len(body))
    asked = decode(memoryview(body)[:head], _Infer)
    if asked.model_name and asked.model_name != model[0]:
        raise InvalidRequest("model_name", f"{shown(asked.model_name)} is not that of the path")
    outputs, parameters = asked.outputs or [], dict(asked.parameters or {})
    is_binary_else = _flag(BINARY_OUTPUT, parameters.pop(BINARY_OUTPUT, False))
    check_counts(len(asked.inputs), len(outputs), len(parameters))
    binary = {
        output.name: _flag(f"outputs: {BINARY_DATA}", output.parameters.pop(BINARY_DATA))
        for output in outputs
        if output.parameters and BINARY_DATA in output.parameters
    }
    request = Asked(
        check_request_id("id", asked.id or ""),
        *model,
        parameters,
        _inputs(asked.inputs, memoryview(body)[head:]),
        [Wanted(output.name, tuple(output.parameters or ())) for output in outputs],
    )
    return Posted(to_inference(request, len(body), longest), binary, is_binary_else)


def _read_generate(body: bytes, model: tuple[str, str], longest: int | None) -> Posted:
    """Return a request that has its text and whatever else by name, the latter in `parameters` or beside them."""
    told = decode(body, dict[str, Any])
    request_id, text, more = told.pop("id", ""), told.pop(TEXT_INPUT, UNSET), told.pop("parameters", None)
    if not isinstance(request_id, str):
        raise InvalidRequest("id", "is not a text")
    if more is not None and not isinstance(more, dict):
        raise InvalidRequest("parameters", "is no JSON object")
    for name in told.keys() & (more or {}).keys():
        raise InvalidRequest("parameters", f"{shown(name)} is given twice, in them and beside them")
    if text is UNSET:
        raise InvalidRequest(TEXT_INPUT, "is missing")
    parameters = told | (more or {})
    check_counts(1, 0, len(parameters))
    texts = text if isinstance(text, list) else [text]
    source = Input(TEXT_INPUT, "BYTES", [len(texts)], (), lambda datatype, count: from_values(TEXT_INPUT, datatype, texts, count))
    return Posted(to_inference(Asked(check_request_id("id", request_id), *model, parameters, [source]), len(body), longest))


def _head_length(said: str | None, num_bytes: int) -> int:
    """Return how many bytes of a body are JSON."""
    if said is None:
        return num_bytes
    is_number = said.isascii() and said.isdecimal() and len(said) <= MAX_LENGTH_DIGITS
    if not is_number or not 0 < int(said) <= num_bytes:
        raise InvalidRequest(LENGTH_KEY, f"is the number of bytes of the JSON that the body begins with; it has {num_bytes} in all")
    return int(said)


def _inputs(tensors: Sequence[_Tensor], rest: memoryview) -> list[Input]:
    """Return inputs with their content, that of some from what follows the JSON, in their order."""
    inputs, position = [], 0
    for number, tensor in enumerate(tensors):
        parameters = dict(tensor.parameters or {})
        if BINARY_SIZE not in parameters:
            inputs.append(Input(tensor.name, tensor.datatype, tensor.shape, tuple(parameters), _listed(tensor)))
            continue
        size, field = parameters.pop(BINARY_SIZE), f"inputs[{number}]"
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest) - position:
            raise InvalidRequest(field, f"{BINARY_SIZE} is a number of bytes; {len(rest) - position} are left behind the JSON")
        if tensor.data is not UNSET:
            raise InvalidRequest(field, "its content is in data and behind the JSON; one of them is enough")
        raw = bytes(rest[position : position + size])
        inputs.append(Input(tensor.name, tensor.datatype, tensor.shape, tuple(parameters), _raw(tensor.name, raw)))
        position += size
    if position < len(rest):
        raise InvalidRequest("body", f"has {len(rest) - position} bytes behind the JSON that are of no input")
    return inputs


def _raw(name: str, raw: bytes) -> Callable[[Datatype, int], Sequence[Any]]:
    return lambda datatype, count: from_raw(name, datatype, raw, count)


def _listed(tensor: _Tensor) -> Callable[[Datatype, int], Sequence[Any]]:
    """Return what takes the content of a tensor from JSON: a list of its elements, or of its rows."""

    def content(datatype: Datatype, count: int) -> Sequence[Any]:
        data, shape = tensor.data, tensor.shape
        if not isinstance(data, list):
            raise InvalidRequest(tensor.name, f"has no content: neither a list in data nor {BINARY_SIZE}")
        if len(shape) > 1 and data and isinstance(data[0], list):
            if len(data) != shape[0] or any(not isinstance(row, list) or len(row) != shape[1] for row in data):
                raise InvalidRequest(tensor.name, f"its content has not the shape {shape}")
            data = [element for row in data for element in row]
        return from_values(tensor.name, datatype, data, count)

    return content


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, "is not true or false")
    return value
