"""Models of the GPU benchmark, their graphs in half precision, and decoders of them on a device.

It needs PyTorch, ONNX and onnxscript to make graphs, and nothing of the server's libraries: a machine with a GPU has seldom more.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dragoman.export.cuda_contract import check_for_cuda
from dragoman.export.fields import BundleError
from dragoman.export.half import DTYPES, halved
from dragoman.export.tensors import attention_caches
from dragoman.model.config import ModelConfig
from dragoman.model.networks.transformer import Transformer
from dragoman.server.runtime.device.device import Device
from dragoman.server.runtime.device.model import Buckets, DeviceModel
from dragoman.server.runtime.device.runner import DeviceRunner

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "model/pretrained/en-de"
SEED, VOCAB_SIZE, MAX_POSITIONS = 0, 32_000, 256
DESCRIPTION = "model.json"
SIZES: dict[str, dict[str, int]] = {
    "base": {},
    "big": {"d_model": 1024, "num_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096},
    "toy": {"d_model": 64, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 128}
    | {"decoder_ffn_dim": 128, "source_vocab_size": 1000, "target_vocab_size": 1000},
}


def random_model(size: str) -> Transformer:
    """Make a random model; `base` and `big` have the dimensions of Vaswani et al. (2017), and no two runs differ."""
    torch.manual_seed(SEED)
    sizes = {"source_vocab_size": VOCAB_SIZE, "target_vocab_size": VOCAB_SIZE} | SIZES[size]
    positions = {"max_source_positions": MAX_POSITIONS, "max_target_positions": MAX_POSITIONS}
    return Transformer(ModelConfig(**(sizes | positions))).eval()  # type: ignore[arg-type]


def make_graphs(model: Transformer, precision: str, folder: Path) -> DeviceModel:
    """Write a model's encoder and decode step in half precision, and their description; see `read_graphs`."""
    from dragoman.export.graphs.transformer import EncoderGraph, StepGraph
    from dragoman.export.half import store_halved
    from dragoman.export.tracing import trace, write

    folder.mkdir(parents=True, exist_ok=True)
    half = halved(model, DTYPES[precision])
    for name, module in (("encoder", EncoderGraph(half, is_packed=False)), ("decoder", StepGraph(half))):
        graph = trace(module)
        store_halved(graph, DTYPES[precision])
        write(graph, folder / f"{name}.onnx", f"{name}.weights")
    (folder / DESCRIPTION).write_text(json.dumps({"precision": precision} | asdict(model.config)), encoding="utf-8")
    return read_graphs(folder)


def read_graphs(folder: Path) -> DeviceModel:
    """Return the description that `make_graphs` wrote."""
    described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    layers, num_heads = described["num_decoder_layers"], described["num_heads"]
    described |= {
        "caches": attention_caches(layers, num_heads, described["d_model"] // num_heads),
        "num_choices": described["target_vocab_size"],
        "max_source_tokens": described["max_source_positions"],
        "max_target_tokens": described["max_target_positions"],
    }
    return DeviceModel.of(folder, SimpleNamespace(**described))


def graphs_of(name: str, model: Transformer, precision: str, folder: Path) -> DeviceModel:
    """Return a model's graphs from a folder, made there if they are missing, or CUDA does not compute them."""
    place = folder / f"{name}-{precision}"
    try:
        for graph in ("encoder.onnx", "decoder.onnx"):
            check_for_cuda(place / graph)
        return read_graphs(place)
    except (OSError, BundleError):
        return make_graphs(model, precision, place)


def open_device(name: str) -> Device:
    """Return the device `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceError: If it cannot be used.
    """
    if name == "cpu":
        from dragoman.server.runtime.device.device import HostDevice

        return HostDevice(torch.get_num_threads())
    from dragoman.server.runtime.device.cuda import CudaDevice
    from dragoman.server.runtime.providers import choose_device

    choice = choose_device(name, "fp16")
    assert choice.ordinal is not None, "CUDA was asked for"
    return CudaDevice(choice.ordinal)


def open_decoder(
    device: Device, model: DeviceModel, max_rows: int, *, max_candidates: int | None = None, **settings: Any
) -> DeviceRunner:
    """Load graphs on a device and capture its steps; without `max_candidates` for any number of candidates."""
    buckets = Buckets.of(max_rows, max_candidates or model.target_vocab_size, model.max_target_tokens, model.max_source_tokens)
    decoder = DeviceRunner(device, model, buckets, prefill_tokens=8192, **settings)
    decoder.warm_up()
    while decoder.graphs.has_pending:
        decoder.graphs.capture_next()
    return decoder


def random_sources(model: DeviceModel, count: int, shortest: int, longest: int, seed: int = SEED) -> list[list[int]]:
    """Draw sources, end-of-sequence included."""
    random = np.random.default_rng(seed)
    lengths = random.integers(shortest, longest + 1, count)
    return [[*random.integers(3, model.target_vocab_size, length - 1).tolist(), model.eos_id] for length in lengths]


def greedy(
    decoder: DeviceRunner, model: DeviceModel, sources: Sequence[list[int]], max_new_tokens: int
) -> list[tuple[list[int], list[float]]]:
    """Decode sources as a server does: a row that ends makes room for the next, so that rows stand at different positions.

    Returns:
        Tokens of each answer, end-of-sequence included, and their log-probabilities.
    """
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in sources]
    waiting, rows = list(range(len(sources)))[::-1], list[int]()
    tokens, positions = np.zeros(decoder.max_rows, np.int64), np.zeros(decoder.max_rows, np.int64)
    while waiting or rows:
        new = [waiting.pop() for _ in range(min(len(waiting), decoder.max_rows - len(rows)))]
        if new:
            places = list(range(len(rows), len(rows) + len(new)))
            decoder.prefill([sources[i] for i in new], places)
            tokens[places], positions[places] = model.decoder_start_id, 0
            rows += new
        found = decoder.step(tokens[: len(rows)], positions[: len(rows)], 1)
        tokens[: len(rows)] = found.ids[:, 0]
        positions[: len(rows)] += 1
        for i, log_prob in zip(rows, found.log_probs[:, 0].tolist(), strict=True):
            answers[i][1].append(log_prob)
        for row, i in enumerate(rows):
            answers[i][0].append(int(tokens[row]))
        for row in reversed(range(len(rows))):
            if tokens[row] == model.eos_id or positions[row] == max_new_tokens:
                last = len(rows) - 1
                if row < last:
                    decoder.copy_row(last, row, int(positions[last]))
                    tokens[row], positions[row], rows[row] = tokens[last], positions[last], rows[last]
                rows.pop()
    return answers
