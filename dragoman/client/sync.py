"""The blocking client, generated from `aio.py` by `make client`."""

import threading
import time
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dragoman.client.batch import Outcome
from dragoman.client.batch_stream import BatchRun
from dragoman.client.calls import Calls, Scope, Stream, Wait
from dragoman.client.errors import Unavailable
from dragoman.client.model_info import ModelInfo, model_from_proto
from dragoman.client.request import Request, check_texts, checked_request, fill, generate_request
from dragoman.client.results import Result, Score, result_from_proto, score_from_proto, score_request
from dragoman.client.retry import DEFAULT_RETRY, RetryPolicy
from dragoman.client.search import AS_THE_MODEL_DOES, Search, SearchOptions, with_options
from dragoman.client.settings import DEFAULT_TARGET, ChannelOptions, Settings
from dragoman.v1 import generation_pb2, generation_pb2_grpc


class Client:
    """A connection to a server, for any number of threads; leaving a `with` block or `close` cancels what still runs.

    Args:
        target: Server to call: `host:port`, or `host` alone for port 8500, also after `http://`; or any other gRPC target, such as
            `dns:///host:port` or `unix:/path`. A name with several addresses is balanced over them.
        timeout_seconds: Time for each call, all attempts and the waits between together.
        retry: When failed calls are tried again.
        credentials: For TLS; None for plain text.
        token: Bearer token to send with each call.
        options: gRPC channel options by name, beside ours and before them.
        clock: Seconds that only ever grow; tests put their own in.
        wait: Waits between attempts for a cancellation, at most so many seconds; tests put their own in.

    Every call raises `CallError`, by the gRPC status it ended with; once the client is closed that is `Cancelled`.

    Example:
        with Client("localhost") as client:
            print(client.generate("A dog runs through the snow.", model="en-de", num_beams=4).text)
            for result in client.generate_many(["A dog runs.", "A cat sits on a wall."], model="en-de"):
                print(result.text, result.usage.generated_tokens)

    Raises:
        ValueError: If an argument cannot be used; the message begins with its name.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_seconds: float = 60.0,
        retry: RetryPolicy = DEFAULT_RETRY,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        options: ChannelOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = threading.Event.wait,
    ) -> None:
        self._settings = Settings(target, timeout_seconds, retry, token, options or {}, clock, credentials is not None)
        self._calls = Calls(self._settings, wait)
        self._channel = self._settings.channel(grpc, credentials)
        self._grouping = self._settings.grouping()
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        self._calls.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs and close the connection, for good: calls after that raise `Cancelled`."""
        self._calls.close()
        self._channel.close()

    def scope(self) -> Scope:
        """Make a scope: calls begun under it are cancelled together, by its `cancel` or by leaving its `with` block."""
        return Scope(self._calls.scope)

    def generate(
        self,
        text: str,
        *,
        model: str = "",
        model_version: str = "",
        source_language: str = "",
        target_language: str = "",
        max_new_tokens: int | None = None,
        truncate: bool = False,
        priority: int = 0,
        search: Search = AS_THE_MODEL_DOES,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        scope: Scope | None = None,
        **options: Unpack[SearchOptions],
    ) -> Result:
        """Generate the whole answer.

        Args:
            text: The source.
            model: Model to ask; may be empty where the server has exactly one.
            model_version: Which version of it: its name, what its content gives, or a label; empty for the policy's choice.
            source_language: Language of the source, by any spelling that `models` tells; empty for the model's default.
            target_language: Language of the answer, likewise.
            max_new_tokens: Tokens to generate at the most; None for the model's default.
            truncate: Cut a source that is too long instead of refusing it.
            priority: Among what waits, be served as if it had come this many seconds earlier.
            search: How the answer is searched for.
            request_id: Id for the server's log; None makes one.
            timeout_seconds: Time for this call; None for the client's.
            scope: Cancels this call when it ends.
            **options: Fields of `Search`, such as `num_beams=4`; they win over those of `search`.
        """
        search = with_options(search, **options)
        request = generate_request(
            Request(
                text, model, max_new_tokens, truncate, priority, search, request_id, source_language, target_language, model_version
            )
        )
        response = self._calls.call(
            self._stub.Generate,
            request,
            timeout_seconds,
            scope=scope,
        )
        return result_from_proto(response)

    def stream(
        self,
        text: str,
        *,
        model: str = "",
        model_version: str = "",
        source_language: str = "",
        target_language: str = "",
        max_new_tokens: int | None = None,
        truncate: bool = False,
        priority: int = 0,
        search: Search = AS_THE_MODEL_DOES,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        scope: Scope | None = None,
        **options: Unpack[SearchOptions],
    ) -> Stream:
        """Generate the same answer in pieces; arguments as `generate`."""
        search = with_options(search, **options)
        request = generate_request(
            Request(
                text, model, max_new_tokens, truncate, priority, search, request_id, source_language, target_language, model_version
            )
        )
        return Stream(
            self._calls,
            self._stub.GenerateStream,
            request,
            timeout_seconds,
            scope,
        )

    def generate_many(
        self,
        texts: Iterable[str],
        *,
        concurrency: int = 32,
        model: str = "",
        model_version: str = "",
        source_language: str = "",
        target_language: str = "",
        max_new_tokens: int | None = None,
        truncate: bool = False,
        priority: int = 0,
        search: Search = AS_THE_MODEL_DOES,
        timeout_seconds: float | None = None,
        scope: Scope | None = None,
        **options: Unpack[SearchOptions],
    ) -> Generator[Result, None, None]:
        """Yield the answers of many texts in their order; the first that fails ends them and cancels the rest.

        The texts are read as answers are asked for, at most `2 * concurrency` ahead; dropping the generator cancels what runs.
        They share one stream, as those of `generate_batch` do, and so one server where several share a name.

        Args:
            texts: Sources. A blank one is answered by an empty result in its place, without asking the server.
            concurrency: Requests under way at once.
            model: As for `generate`, as is what follows.
            model_version: Of each.
            source_language: Of each.
            target_language: Of each.
            max_new_tokens: Of each.
            truncate: Of each.
            priority: Of each.
            search: Of each.
            timeout_seconds: Of each.
            scope: Cancels what runs when it ends.
            **options: Of each.
        """
        check_texts(texts)
        self._calls.check()
        search = with_options(search, **options)

        def ask(text: str) -> Request:
            return Request(
                text, model, max_new_tokens, truncate, priority, search, None, source_language, target_language, model_version
            )

        run = BatchRun(
            self._settings.batch_of_texts(self._grouping, timeout_seconds),
            texts,
            ask,
            self._stub,
            self._calls,
            concurrency,
            scope,
        )
        return run.results()

    def generate_batch(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int = 64,
        timeout_seconds: float | None = None,
        scope: Scope | None = None,
    ) -> Generator[Outcome, None, None]:
        """Yield the outcomes of many requests, as they finish, each with its place in the input; they share one stream.

        A request that fails alone is yielded with its error, once it has been tried as often as the client's retry policy says;
        so is the stream when it fails, with what is unanswered. Dropping the generator cancels what runs.

        Args:
            requests: The requests, read as outcomes are taken; one that raises ends the batch after what came before it. While
                it is waited for, no outcome is yielded.
            concurrency: Requests under way at once.
            timeout_seconds: Time for all of it; None for as long as it takes.
            scope: Cancels the batch when it ends.

        Raises:
            CallError: If the stream fails for good.
        """
        self._calls.check()
        run = BatchRun(
            self._settings.batch(self._grouping, timeout_seconds),
            requests,
            checked_request,
            self._stub,
            self._calls,
            concurrency,
            scope,
        )
        return run.outcomes()

    def score(
        self,
        text: str,
        target: str,
        *,
        model: str = "",
        model_version: str = "",
        source_language: str = "",
        target_language: str = "",
        length_penalty: float | None = None,
        return_alignment: bool = False,
        return_word_alignment: bool = False,
        alignment_layer: int | None = None,
        special_tokens_in_text: bool | None = None,
        priority: int = 0,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        scope: Scope | None = None,
    ) -> Score:
        """Return the likelihood of a given target, and, if asked for, attention and the links between words.

        Args:
            text: The source.
            target: The target; may be empty.
            model: Model to ask; may be empty where the server has exactly one.
            model_version: Which version of it: its name, what its content gives, or a label; empty for the policy's choice.
            source_language: Language of the source, by any spelling that `models` tells; empty for the model's default.
            target_language: Language of the target, likewise.
            length_penalty: Exponent of the length in the score; None for the model's default.
            return_alignment: Return the encoder-decoder attention.
            return_word_alignment: Return the links between words.
            alignment_layer: Decoder layer of both, from 0; None for the mean of all.
            special_tokens_in_text: Read the names of special tokens in the source as these tokens; None for the model's default.
            priority: Among what waits, be served as if it had come this many seconds earlier.
            request_id: Id for the server's log; None makes one.
            timeout_seconds: Time for this call; None for the client's.
            scope: Cancels this call when it ends.
        """
        request = score_request(
            text,
            target,
            request_id,
            model=model,
            model_version=model_version,
            source_language=source_language,
            target_language=target_language,
            length_penalty=length_penalty,
            return_alignment=return_alignment,
            return_word_alignment=return_word_alignment,
            alignment_layer=alignment_layer,
            special_tokens_in_text=special_tokens_in_text,
            priority=priority,
        )
        response = self._calls.call(
            self._stub.Score,
            request,
            timeout_seconds,
            scope=scope,
        )
        return score_from_proto(response, request)

    def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """List the server's models, ready or not, by name."""
        response = self._calls.call(self._stub.ListModels, generation_pb2.ListModelsRequest(), timeout_seconds)
        return [model_from_proto(model) for model in response.models]

    def model(self, name: str, version: str = "", *, timeout_seconds: float | None = None) -> ModelInfo:
        """Describe one model, in the version of that name, content or label; empty for the one that its policy prefers."""
        request = fill(generation_pb2.GetModelRequest(), {"model": name, "model_version": version})
        return model_from_proto(self._calls.call(self._stub.GetModel, request, timeout_seconds))

    def is_ready(self, model: str = "", *, timeout_seconds: float | None = None) -> bool:
        """Ask, once, whether a model (empty: the server) answers now; a server that cannot be reached does not.

        Raises:
            ModelNotFound: If there is no such model.
        """
        request = fill(health_pb2.HealthCheckRequest(), {"service": model})
        try:
            response = self._calls.call(self._health.Check, request, timeout_seconds, is_retried=False)
        except Unavailable:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
