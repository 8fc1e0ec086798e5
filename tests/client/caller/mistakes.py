"""A caller's mistakes, and what a type checker says of each: `E: codes` behind a line, `R: type` behind what is revealed."""

from typing import reveal_type

import dragoman
from dragoman import AsyncClient, Client, Nobody, Outcome, Request, Search  # noqa: F401  # E: attr-defined


def blocking(client: Client) -> None:
    client.generate("a", num_beam=4)  # E: call-arg
    client.generate("a", num_beams="4")  # E: arg-type
    client.generate(["a", "b"])  # E: arg-type
    client.generate("a", search={"num_beams": 4})  # E: arg-type
    client.generate("a", 4)  # E: call-arg, arg-type
    client.stream("a", top_k=0.5)  # E: arg-type
    client.generate_many(["a"], num_beam=4)  # E: call-arg
    client.generate_many([b"a"])  # E: list-item
    client.generate_batch(["a"])  # E: list-item
    client.score("a")  # E: call-arg
    client.score("a", "b", target_language=None)  # E: arg-type
    client.generate("a", do_sample="no")  # E: arg-type
    Search(num_beam=4)  # E: call-arg
    Request(b"a")  # E: arg-type
    Client(b"localhost")  # E: arg-type
    print(client.generate("a").txt)  # E: attr-defined
    print(dragoman.nobody)  # E: attr-defined
    reveal_type(client.generate("a").answers[0].log_probs[0].top)  # R: tuple[dragoman.client.results.TokenLogProb, ...]
    reveal_type(client.generate_many(["a"]))  # R: typing.Generator[dragoman.client.results.Result, None, None]
    reveal_type(next(client.stream("a")).result)  # R: dragoman.client.results.Result | None
    reveal_type(client.score("a", "b").log_prob)  # R: float
    reveal_type(dragoman.__version__)  # R: str
    reveal_type(Search().num_beams)  # R: int | None
    reveal_type(client.models()[0].defaults.early_stopping)  # R: bool | None


async def asynchronous(client: AsyncClient, outcome: Outcome) -> None:
    await client.generate("a", num_beam=4)  # E: call-arg
    await client.generate(["a"])  # E: arg-type
    client.stream("a", seed="x")  # E: arg-type
    client.generate_many(["a"], length_penalty="x")  # E: arg-type
    print(client.generate("a").text)  # E: attr-defined
    print(outcome.result.text)  # E: union-attr
    reveal_type(await client.generate("a", top_p=0.5))  # R: dragoman.client.results.Result
    reveal_type([piece async for piece in client.stream("a")])  # R: list[dragoman.client.results.Piece]
    reveal_type(client.generate_many(["a"]))  # R: typing.AsyncGenerator[dragoman.client.results.Result, None]
    reveal_type([one.error async for one in client.generate_batch([])])  # R: list[dragoman.client.errors.CallError | None]
