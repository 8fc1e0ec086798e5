"""That what the configuration says of a device is what engines are started with."""

from pathlib import Path

import msgspec

from dragoman.export.bundle import Bundle
from dragoman.server.config import load
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings


def test_engines_are_started_with_the_settings_of_the_device(tiny_bundle: Path) -> None:
    config = load(
        {
            "models": tiny_bundle.parent,
            "device": "cuda:1",
            "gpu_memory_gib": 2**20,
            "gpu_row_buckets": [3, 5],
            "gpu_capacity_buckets": [64],
            "gpu_attention_kernels": "math",
            "gpu_graphs": "start",
            "gpu_steps_ahead": False,
            "weights_cache": "off",
        }
    )
    (settings,) = engine_settings(config, Bundle.open(tiny_bundle), EnginePlan(1, ((),)))
    assert settings.device == DeviceSettings("cuda:1", 2**50, (3, 5), (64,), "", "math", "start", False)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=EngineSettings) == settings
