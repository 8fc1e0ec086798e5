"""Attention of a server's model: what `Score` tells, the mean of the heads of each decoder layer to the source."""

from collections.abc import Iterator

from dragoman.attention.maps import Kind, Look, Map, Part, Room
from dragoman.attention.tokens import token
from dragoman.client.errors import InvalidArgument
from dragoman.client.results import Score
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
    model: tuple[str, str] = ("", ""),
    languages: tuple[str, str] = ("", ""),
) -> Look:
    """Ask a server for the attention of a pair, one layer at a time, and for the mean of all.

    Args:
        client: Asks.
        source: The text.
        target: What the model is to say; None for its greedy answer.
        room: What can be drawn.
        layer: The only one to ask for; None for all.
        max_new_tokens: Tokens of a greedy answer at the most; None for as the model does.
        model: Name and version, as `Client.score` takes them.
        languages: Of source and target.

    Raises:
        InputError: If there is too much of something, or the server refuses the pair.
        CallError: If a call fails.
    """
    asked = _Asked(client, source, layer, model, languages)
    try:
        target, notes = (target, []) if target is not None else asked.answer(max_new_tokens)
        scores: list[tuple[int | None, Score]] = []
        for wanted, score in asked.layers(target):
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
    look = Look(score.model, source, target, (Part(Kind.CROSS, *_axes(score), tuple(maps)),), (_NOTE, *notes))
    room.check(look)
    return look


class _Asked:
    """Question to a server about one source."""

    def __init__(self, client: Client, source: str, layer: int | None, model: tuple[str, str], languages: tuple[str, str]) -> None:
        """Take who asks, the text, the only layer to ask for if there is one, name and version, languages of source and target."""
        self.client, self.source, self.layer = client, source, layer
        self.source_language, self.target_language = languages
        self.name, self.version = model

    def answer(self, max_new_tokens: int | None) -> tuple[str, list[str]]:
        """Return the greedy answer, and what is to be said of it."""
        said = self.client.generate(
            self.source,
            model=self.name,
            model_version=self.version,
            source_language=self.source_language,
            target_language=self.target_language,
            max_new_tokens=max_new_tokens,
            search=Search(num_beams=1, do_sample=False, num_return_sequences=1),
        )
        self.name, self.version = said.model, said.model_version  # there may be a newer one by the time of the next call
        is_cut = said.finish_reason == "length"
        return said.text, [f"The answer did not end within {len(said.tokens)} tokens; it is cut there."] if is_cut else []

    def layers(self, target: str) -> Iterator[tuple[int | None, Score]]:
        """Give the scores with the mean of all layers, and then with each, or with the one that is wanted alone.

        Raises:
            InputError: If the model does not have that layer.
        """
        wanted = self.layer
        while True:
            try:
                score = self._score(target, wanted)
            except InvalidArgument as error:
                if not error.message.startswith(f"{_LAYER_FIELD}: "):
                    raise
                if self.layer is not None:
                    raise InputError(error.message.replace(_LAYER_FIELD, "--layer", 1)) from error
                return  # it has no more
            yield wanted, score
            if self.layer is not None:
                return
            self.name, self.version = score.model, score.model_version
            wanted = 0 if wanted is None else wanted + 1

    def _score(self, target: str, layer: int | None) -> Score:
        return self.client.score(
            self.source,
            target,
            model=self.name,
            model_version=self.version,
            source_language=self.source_language,
            target_language=self.target_language,
            return_alignment=True,
            alignment_layer=layer,
        )


def _axes(score: Score) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens of rows and columns as they are shown. A target ends with end-of-sequence, as does a source with one."""
    assert score.alignment is not None
    pieces = score.alignment.source_pieces
    special = "eos" if sum(not piece for piece in pieces) == 1 else "special"
    last = len(score.tokens) - 1
    rows = (token(said.piece, "eos" if place == last else str(said.token)) for place, said in enumerate(score.tokens))
    return tuple(rows), tuple(token(piece, special) for piece in pieces)
