"""Messages that are larger than they may be: which cannot be cured by sending them, so they are not sent."""

from typing import Final

from google.protobuf.message import Message

from dragoman.client.errors import TooLarge

# What servers of this kind take unless they are set otherwise.
DEFAULT_MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
SEND_OPTION: Final = "grpc.max_send_message_length"


def check_size(message: Message, max_bytes: float, request_id: str = "") -> None:
    """Do nothing if a request is small enough to be sent.

    Args:
        message: The request.
        max_bytes: Largest that is sent.
        request_id: Its id, for the error.

    Raises:
        TooLarge: If it is not, naming its largest field.
    """
    size = message.ByteSize()
    if size <= max_bytes:
        return
    name, field_bytes = max(((field.name, _field_bytes(value)) for field, value in message.ListFields()), key=lambda pair: pair[1])
    reason = f"{field_bytes} bytes make the request one of {size}; at most {max_bytes:.0f} are sent ({SEND_OPTION})"
    raise TooLarge(f"{name}: {reason}", request_id, max_bytes=max_bytes)


def _field_bytes(value: object) -> int:
    """Return about how many bytes a field's value takes."""
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if hasattr(value, "__len__") else 8
