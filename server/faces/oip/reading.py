"""How `ModelInferRequest` is read: what cannot be understood is refused in its place, and of the message itself nothing is kept."""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.grpc.reading import CANNOT_BE_PARSED, Refused, note_large
from dragoman.server.faces.oip.inference import Inference, check_id, to_inference


def infer_reader(deserialise: Callable[[bytes], Any], max_characters: Callable[[], int]) -> Callable[[bytes], Inference | Refused]:
    """Return what reads a message; arguments as those of `reader` of gRPC's own services."""

    def read(data: bytes) -> Inference | Refused:
        longest = max_characters() if note_large(data) else None
        request_id = ""
        try:
            message = deserialise(data)
            request_id = check_id(message)
            return to_inference(message, len(data), longest)
        except DecodeError:
            return Refused(InvalidRequest("request", CANNOT_BE_PARSED))
        except InvalidRequest as error:
            return Refused(error.with_traceback(None), request_id)  # whose frames have all of the message

    return read
