"""Attention of a server's model: what `Score` tells, the mean of the heads of each decoder layer to the source."""

from collections.abc import Iterator
from typing import Any

from dragoman.attention.maps import Kind, Look, Map, Part, Room, token
from dragoman.client.errors import InvalidArgument
from dragoman.client.results import Result, Score
from dragoman.client.search import Search, refusal
from dragoman.client.sync import Client
from dragoman.model.errors import InputError

_LAYER_FIELD = "alignment_layer"
_NOTE = "A server tells of cross-attention alone, the mean of each layer's heads; a checkpoint shows all there is."


def ask(
    client: Client,
    source: str,
    target: str | None,
    room: Room,
    *,
    layer: int | None = None,
    max_new_tokens: int | None = None,
    **names: Any,
) -> Look:
    """Ask a server for the attention of a pair, one layer at a time, and for the mean of all.

    Args:
        client: Asks.
        source: The text.
        target: What the model is to say; None for its greedy answer.
        room: What can be drawn.
        layer: The only one to ask for; None for all.
        max_new_tokens: Tokens of a greedy answer at the most; None for as the model does.
        **names: Model, version and languages, as `Client.score` takes them.

    Raises:
        InputError: If there is too much of something, or the server refuses the pair.
        CallError: If a call fails.
    """
    notes = [_NOTE]
    scores: list[tuple[int | None, Score]] = []
    try:
        if target is None:
            greedy = Search(num_beams=1, do_sample=False, num_return_sequences=1)
            answer = client.generate(source, max_new_tokens=max_new_tokens, search=greedy, **names)
            target = answer.text
            names = _same_model(names, answer)
            if answer.finish_reason == "length":
                notes.append(f"The answer did not end within {len(answer.tokens)} tokens; it is cut there.")
        for wanted, score in _layers(client, source, target, layer, names):
            assert score.alignment is not None
            room.check_tokens("source", len(score.alignment.source_pieces))
            room.check_tokens("target", len(score.tokens))
            scores.append((wanted, score))
            if len(scores) == room.max_maps:
                break
    except InvalidArgument as error:
        raise refusal("the server", error.message) from error
    maps = [Map(score.alignment.weights, wanted, None) for wanted, score in scores if score.alignment is not None]
    maps = [*maps[1:], maps[0]] if layer is None else maps
    look = Look(score.model, source, target, (Part(Kind.CROSS, *_axes(score), tuple(maps)),), tuple(notes))
    room.check(look)
    return look


def _layers(
    client: Client, source: str, target: str, layer: int | None, names: dict[str, Any]
) -> Iterator[tuple[int | None, Score]]:
    """Yield the score with the mean of all layers, and then those with each, or the one with the layer that is wanted alone.

    Raises:
        InputError: If the model does not have that layer.
    """
    wanted = layer
    while True:
        try:
            score = client.score(source, target, return_alignment=True, alignment_layer=wanted, **names)
        except InvalidArgument as error:
            if not error.message.startswith(f"{_LAYER_FIELD}: "):
                raise
            if layer is not None:
                raise InputError(error.message.replace(_LAYER_FIELD, "--layer", 1)) from error
            return  # it has no more
        yield wanted, score
        if layer is not None:
            return
        names = _same_model(names, score)
        wanted = 0 if wanted is None else wanted + 1


def _same_model(names: dict[str, Any], answer: Result | Score) -> dict[str, Any]:
    """Name the model that answered: there may be a newer one by the time of the next call."""
    return names | {"model": answer.model, "model_version": answer.model_version}


def _axes(score: Score) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens of rows and columns as they are shown. A target ends with end-of-sequence, as does a source with one."""
    assert score.alignment is not None
    pieces = score.alignment.source_pieces
    special = "eos" if sum(not piece for piece in pieces) == 1 else "special"
    last = len(score.tokens) - 1
    rows = (token(said.piece, "eos" if place == last else str(said.token)) for place, said in enumerate(score.tokens))
    return tuple(rows), tuple(token(piece, special) for piece in pieces)
