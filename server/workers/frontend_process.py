"""The process of one frontend worker: a front end, and the pipes to the process that started it.

Started as `python -m dragoman.server.workers.frontend_process`. It ends when told to drain, or when its standard input closes
because its parent is gone.
"""

import asyncio
import os
import shutil
import signal
import sys
from functools import partial
from typing import Any, NoReturn

import msgspec
import structlog
from prometheus_client.registry import CollectorRegistry

from dragoman.model.errors import InputError
from dragoman.server.config import ServerConfig
from dragoman.server.models.loaded import SleepingEngine
from dragoman.server.models.registry import Repository
from dragoman.server.telemetry import logs
from dragoman.server.telemetry.caller_metrics import CallerMetrics
from dragoman.server.telemetry.logs import Sampler
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.series import take_series
from dragoman.server.telemetry.tracers import make_tracer
from dragoman.server.watching import Source
from dragoman.server.workers.front_end import FrontEnd
from dragoman.server.workers.messages import (
    Awaited,
    CarriedOut,
    Collect,
    Counted,
    Desk,
    Drain,
    Failed,
    Files,
    FromFrontEnd,
    NotLoaded,
    Serve,
    Start,
    State,
    ToFrontEnd,
    read_message,
    to_bytes,
)
from dragoman.server.workers.operators import FarOperators
from dragoman.server.workers.processors import end_process, give_back_large_blocks, keep_what_is_there
from dragoman.server.workers.served import FarEngine, FrontEngine, HandedFiles, ServedVersions
from dragoman.server.workers.shared_counters import UsageTable
from dragoman.server.workers.supervisor import INITIAL_BACKOFF_SECONDS

SIGN_OF_LIFE_SECONDS = 1.0
# Writing down what has been counted takes milliseconds, more where there are many callers; so much longer it is let be after that.
REST = 100.0
EXIT_CANNOT_START = 3

log = structlog.get_logger("dragoman.fronts")


class FrontEndProcess:
    """See above."""

    def __init__(self, start: Start, output: int, sampler: Sampler) -> None:
        """Make everything that can fail; nothing runs yet.

        Args:
            start: What it is to be.
            output: Descriptor of the pipe to the process that started this one.
            sampler: What leaves out other libraries' log lines.

        Raises:
            InputError: If a setting or a bundle cannot be used.
        """
        self._start, self._output = start, output
        self._files = HandedFiles(start.files)
        self._config = read_config(start, self._files)
        self._registry = CollectorRegistry()
        metrics = Metrics(self._registry, start.version)
        self._repository: Repository = Repository()
        self._metrics = metrics
        self._served = ServedVersions(
            self._repository,
            self._attach,
            prepare=lambda model: self._front.core.generation.prepare(model),
            on_change=self._on_other_models,
            say=self._say,
        )
        self._served.read(start.models)
        self._describe_models()
        table = UsageTable(start.table, self._config.front_ends, start.number)
        tracer = make_tracer(self._config, start.version)
        known = [served.name for served in start.models.models if any(desk.was_ready for desk in served.desks)]
        self._operators: FarOperators | None = None
        if self._config.http_admin:
            self._operators = FarOperators(self._config, metrics, CallerMetrics(CollectorRegistry()), self._say)
        way = None if self._operators is None else self._operators.way
        self._front = FrontEnd(self._config, self._repository, metrics, tracer, sampler, table.of, known, way)
        self._front.on_awaited(lambda: self._say(Awaited(sorted(self._repository.waiting.names))))
        self._state = State()
        self._is_listening = False

    async def run(self, input_descriptor: int) -> None:
        """Serve until told to end."""
        loop = asyncio.get_running_loop()
        self._drain: asyncio.Future[Drain] = loop.create_future()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), os.fdopen(input_descriptor, "rb", 0))
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(self._output, "wb", 0))
        await self._served.begin(self._start.models)
        await self._front.start()
        self._is_listening = True
        log.info("front end listens", port=self._front.port, pid=os.getpid())
        self._publish()
        following = asyncio.create_task(self._follow(reader))  # to the very end: somebody may be gone during the drain
        living = asyncio.create_task(self._give_signs_of_life())
        keep_what_is_there()
        drain = await self._drain
        if self._operators is not None:
            self._operators.drain()
        await self._front.drain(drain.seconds)
        living.cancel()
        await self._front.end()
        await self._front.flush()
        self._served.tell_used()
        self._say(Counted(take_series(self._registry)))
        while self._writer.get_write_buffer_size():
            await asyncio.sleep(0.001)
        following.cancel()

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Do what is asked for, for as long as somebody is there who may ask."""
        decoder = msgspec.msgpack.Decoder(ToFrontEnd)
        sources = [*self._front.sources(), *(() if self._operators is None else self._operators.sources())]
        while (payload := await read_message(reader)) is not None:
            match decoder.decode(payload):
                case Files(contents):
                    self._files.replace(contents)
                    for source in sources:
                        await _reload(source)
                case Serve() as serve:
                    self._served.take(serve)
                case NotLoaded(model, reason, retry_after_seconds):
                    self._front.refuse_waiting(model, reason, retry_after_seconds)
                case CarriedOut() as done if self._operators is not None:
                    self._operators.take(done)
                case Collect():
                    self._say(Counted(take_series(self._registry), is_asked=True))
                case Drain() as drain if not self._drain.done():
                    self._drain.set_result(drain)
        shutil.rmtree(self._start.folder, ignore_errors=True)  # in the place of who made it
        end_process(0)

    async def _give_signs_of_life(self) -> None:
        """Say how this front end is, and what it has counted, lest it be forgotten if it dies before anybody asks."""
        loop, count_at = asyncio.get_running_loop(), 0.0
        while True:
            self._say(self._state)
            self._served.tell_used()
            if (began := loop.time()) >= count_at:
                self._say(Counted(take_series(self._registry)))
                count_at = began + REST * (loop.time() - began)
            await asyncio.sleep(SIGN_OF_LIFE_SECONDS)

    def _publish(self) -> None:
        """Tell callers and the process that started this one how the models are now."""
        self._front.update_health()
        if self._is_listening:
            self._state = State(is_listening=True, is_ready=self._front.is_ready)
            self._say(self._state)

    def _say(self, message: FromFrontEnd) -> None:
        self._writer.write(to_bytes(message))

    def _on_other_models(self) -> None:
        """Tell callers and metrics what is served now."""
        self._describe_models()
        self._publish()

    def _describe_models(self) -> None:
        models = self._repository.all()
        self._metrics.keep_models(model.name for model in models)
        for model in models:
            # What engines do is told where they are: series of theirs here would stay when they sleep.
            self._metrics.add_model(model.name, model.version, model.manifest.precision, "", model.max_slots, 0)

    def _attach(self, name: str, desk: Desk) -> FrontEngine:
        if desk.is_asleep:
            return SleepingEngine(name, desk.settings, desk.num_replicas, desk.device)
        return FarEngine(
            name,
            desk,
            self._start.identity,
            retry_seconds=INITIAL_BACKOFF_SECONDS,
            on_statistics=lambda _: None,  # the desk tells them once, to the process it lives in
            on_change=self._publish,
        )


async def _reload(source: Source) -> None:
    """Put files to use that have been found good already."""
    try:
        source.use(await asyncio.to_thread(source.load))
    except Exception:
        log.exception("cannot be used, what was read before stays in use", source=source.name)


def read_config(start: Start, files: HandedFiles) -> ServerConfig:
    """Return the settings, as they are for a front end."""
    given = msgspec.json.decode(start.config, type=dict[str, Any])
    ports = {"port": start.port, "http_port": start.http_port}
    return ServerConfig(**given | ports | {name: str(path) for name, path in files.paths.items()})


def main() -> NoReturn:
    """Run the front end that standard input describes."""
    # Who started it decides when it ends; signals meant for that process's group must not.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no message
    start = _read_start()
    given = msgspec.json.decode(start.config, type=dict[str, Any])
    sampler = logs.configure_logging(given["log_level"], given["log_format"], fields={"front_end": start.number})
    give_back_large_blocks()
    try:
        process = FrontEndProcess(start, output, sampler)
        with asyncio.Runner() as runner:
            runner.run(process.run(0))
            end_process(0)
    except InputError as error:
        os.write(output, to_bytes(Failed(str(error))))
        end_process(EXIT_CANNOT_START)


def _read_start() -> Start:
    """Return the first message; at the end of input there is nothing to do."""

    def read(length: int) -> bytes:
        content = b""
        while len(content) < length:
            if not (part := os.read(0, length - len(content))):
                sys.exit(0)
            content += part
        return content

    return msgspec.msgpack.decode(read(int.from_bytes(read(4), "little")), type=Start)


if __name__ == "__main__":
    main()
