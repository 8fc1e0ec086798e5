"""For every test of the server: a scripted model, the log, and one tiny bundle where a real model is needed."""

import asyncio
import inspect
import io
import json
import logging
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.telemetry.logs import configure_logging
from tests.server.scripted import scripted_model


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until a condition holds, which nothing else tells."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run(lambda: pyfuncitem.obj(**arguments))
    return True


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario in an event loop of its own; it leaves no task behind, and no error in a callback goes unseen."""

    async def checked() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        await scenario()
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"
        assert problems == []

    asyncio.run(checked())


TEXTS = ["Ein Hund läuft durch den Schnee.", "A dog runs through the snow.", "Zwei Männer spielen Fußball.", "日本語 のテキスト 🐕"]


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Checkpoint:
    """A random model that never ends a sequence by itself; no mistake hides behind a parameter that is 0 or 1."""
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=32,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
        max_source_positions=24,
        max_target_positions=20,
        has_output_bias=True,
    )
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(float(name.endswith("norm.weight")), 0.2, generator=generator)
        assert model.decoder.output_bias is not None
        model.decoder.output_bias[config.eos_id] = -60
    return Checkpoint("tiny", model, Tokenizers.shared(ByteLevelTokenizer.train(["a dog runs over the grass"], 280)))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Checkpoint, shelf) -> Path:
    """Return its bundle, which no test may change."""

    def make(folder: Path) -> None:
        tiny_checkpoint.save(folder / "checkpoint")
        export_checkpoint(folder / "checkpoint", folder / "bundle")

    return shelf.get("tiny", make) / "bundle"


@pytest.fixture
def bundle_copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be damaged."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def tokenizer() -> ByteLevelTokenizer:
    return ByteLevelTokenizer.train(TEXTS * 4, vocab_size=330)


@pytest.fixture
def make_model(tokenizer: ByteLevelTokenizer) -> Callable[..., Any]:
    return lambda name="en-de", **limits: scripted_model(tokenizer, name, **limits)


@pytest.fixture
def logged() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return what has been logged so far, parsed; every line must be JSON."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
