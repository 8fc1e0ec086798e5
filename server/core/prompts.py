"""Whether a prompt and what follows it fit a model: they share one room, of `max_target_tokens`.

A prompt's last token is what the decoder is fed first, so it takes no place besides the answer: of p tokens of a prompt, f that are
forced and n that are generated, p - 1 + f + n are at most the room. A prompt itself may have `max_source_tokens`.
"""

from collections.abc import Sequence

from dragoman.server.core.frames import Frame
from dragoman.server.core.ports import Limited
from dragoman.server.core.requests import GenerateRequest
from dragoman.server.errors import InvalidRequest


def fitted(
    ids: Sequence[int], num_prefix_tokens: int, max_new_tokens: int, request: GenerateRequest, model: Limited, frame: Frame
) -> tuple[list[int], int]:
    """Return what is kept of a prompt's text, its end, and how many tokens may be generated after it.

    Where the request does not say how many, they are the model's default or what the prompt leaves; a prompt that is cut leaves the
    default, or half of the room where that is more than half.

    Args:
        ids: Of the text.
        num_prefix_tokens: Tokens of `forced_prefix`.
        max_new_tokens: Tokens to generate at the most, after a prompt of one token.
        request: What the caller sent.
        model: The model it is for.
        frame: Of its languages.

    Raises:
        InvalidRequest: If the prompt is too long, by itself or for what is to follow it, and may not be cut.
    """
    limit, room = model.manifest.max_source_tokens, model.manifest.max_target_tokens
    count, num_forced = len(ids) + frame.num_around, len(frame.target_prefix) + num_prefix_tokens
    num_least = 1 if request.max_new_tokens is None else request.max_new_tokens
    most = min(limit, room + 1 - num_forced - num_least)
    if count <= most:
        return list(ids), min(max_new_tokens, room + 1 - num_forced - count)
    forced = f" and {num_forced} that are forced" if num_forced else ""
    if not request.truncate:
        if count > limit:
            raise InvalidRequest("text", f"{_counted(count, frame)}; max_source_tokens of model {model.name} is {limit}")
        if request.max_new_tokens is None:
            whose = f"max_target_tokens of model {model.name} is {room}"
            raise InvalidRequest("text", f"{_counted(count, frame)}{forced}, leave none to generate; {whose}")
        left = room + 1 - num_forced - count
        raise InvalidRequest(
            "max_new_tokens",
            f"{num_least} is more than {max(left, 0)}, which a prompt of {count} tokens{forced} leave of {room}, "
            f"max_target_tokens of model {model.name}",
        )
    if most < frame.num_around:
        raise InvalidRequest(
            "max_new_tokens",
            f"{num_least} tokens{forced} leave no place for the {frame.num_around} around a text; max_target_tokens of model "
            f"{model.name} is {room}",
        )
    if request.max_new_tokens is None:
        wanted = min(max_new_tokens, max((room - num_forced) // 2, 1))
        most = max(min(limit, room + 1 - num_forced - wanted), frame.num_around)
    kept = list(ids[len(ids) - min(most - frame.num_around, len(ids)) :])
    return kept, min(max_new_tokens, room + 1 - num_forced - len(kept) - frame.num_around)


def check_target(num_target_tokens: int, num_prompt_tokens: int, model: Limited) -> None:
    """Do nothing if a target that is given fits behind a prompt.

    Args:
        num_target_tokens: Its tokens, end-of-sequence included.
        num_prompt_tokens: The prompt's, all of them.
        model: The model they are for.

    Raises:
        InvalidRequest: If it does not.
    """
    room = model.manifest.max_target_tokens
    if num_target_tokens > (left := room + 1 - num_prompt_tokens):
        raise InvalidRequest(
            "target",
            f"{num_target_tokens} tokens, end-of-sequence included; a prompt of {num_prompt_tokens} leaves {max(left, 0)} of "
            f"{room}, max_target_tokens of model {model.name}",
        )


def _counted(count: int, frame: Frame) -> str:
    around = "the start token" if frame.num_around == 1 else "the start token and what its languages put around a text"
    return f"{count} tokens, {around} included"
