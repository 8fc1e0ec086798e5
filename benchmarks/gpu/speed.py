"""Speed: time of a step by rows, with and without graphs and steps ahead, beside the least that memory allows, and peers."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.models import open_decoder, random_sources
from dragoman.model.networks.transformer import Transformer
from dragoman.server.runtime.device.device import Device
from dragoman.server.runtime.device.model import DeviceModel
from dragoman.server.runtime.device.runner import DeviceRunner

Measure = Callable[[Sequence[list[int]], int], float]
"""Decodes a batch of sources, this many tokens each, and returns the seconds."""

SOURCE_TOKENS, WARM_STEPS, NUM_STEPS = 20, 10, 60
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"has_graphs": False, "is_ahead": False},
    "graphs": {"is_ahead": False},
    "graphs, ahead": {},
}


def step_seconds(decoder: DeviceRunner, model: DeviceModel, num_rows: int, num_steps: int) -> float:
    """Return the median time of a greedy step of this many rows, host and bus included."""
    decoder.prefill(random_sources(model, num_rows, SOURCE_TOKENS, SOURCE_TOKENS), list(range(num_rows)))
    tokens, positions = np.full(num_rows, model.decoder_start_id, np.int64), np.zeros(num_rows, np.int64)
    times = []
    for _ in range(WARM_STEPS + num_steps):
        started = time.perf_counter()
        found = decoder.step(tokens, positions, 1)
        times.append(time.perf_counter() - started)
        tokens, positions = found.ids[:, 0].copy(), positions + 1
    return statistics.median(times[WARM_STEPS:])


def steps_by_rows(device: Device, name: str, model: DeviceModel, rows: Sequence[int], num_steps: int) -> list[dict[str, Any]]:
    """Measure each variant at each number of rows, in turns."""
    decoders = {way: open_decoder(device, model, max(rows), **settings) for way, settings in WAYS.items()}
    bandwidth = memory_bandwidth(device)
    found = []
    for num_rows in rows:
        for way, decoder in decoders.items():
            seconds = step_seconds(decoder, model, num_rows, num_steps)
            floor = step_bytes(model, num_rows) / bandwidth
            found.append(
                {
                    "model": name,
                    "precision": model.precision,
                    "rows": num_rows,
                    "way": way,
                    "step_ms": round(1000 * seconds, 4),
                    "tokens_per_second": round(num_rows / seconds),
                    "floor_ms": round(1000 * floor, 4),
                }
            )
    return found


def step_bytes(model: DeviceModel, num_rows: int) -> int:
    """Return the least bytes that a step reads: the decoder's weights, the widened projection, the valid part of the caches."""
    weights = model.decoder_path.with_suffix(".weights").stat().st_size + 4 * model.target_vocab_size * model.d_model
    pairs = (model.cross_kv, SOURCE_TOKENS), (model.self_kv, WARM_STEPS + NUM_STEPS // 2)
    return weights + num_rows * sum(kind.num_tensors * kind.token_bytes * positions for kind, positions in pairs)


def memory_bandwidth(device: Device) -> float:
    """Measure how many bytes a second the device reads and writes when it copies."""
    size = 2**28 if device.kind == "cuda" else 2**25
    source, target = device.allocate(size), device.allocate(size)
    times = []
    for _ in range(10):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            device.copy(target, source, size)
        device.synchronize()
        times.append(time.perf_counter() - started)
    device.free(source)
    device.free(target)
    return 4 * 2 * size / statistics.median(times)


def our_seconds(decoder: DeviceRunner, model: DeviceModel, sources: Sequence[list[int]], num_tokens: int) -> float:
    """Return the time to encode sources and to decode this many tokens of each, all in one batch."""
    started = time.perf_counter()
    decoder.prefill(sources, list(range(len(sources))))
    tokens, positions = np.full(len(sources), model.decoder_start_id, np.int64), np.zeros(len(sources), np.int64)
    for _ in range(num_tokens):
        found = decoder.step(tokens, positions, 1)
        tokens, positions = found.ids[:, 0].copy(), positions + 1
    return time.perf_counter() - started


def transformers_seconds(model: Transformer, half: torch.dtype, torch_device: str) -> Measure:
    """Return a measure of Transformers' `generate` with the same weights in half precision.

    Raises:
        ImportError: If Transformers is not installed.
    """
    from benchmarks.engines.transformers_model import to_transformers

    theirs: Any = to_transformers(model).to(half).to(torch_device).eval()

    def measure(sources: Sequence[list[int]], num_tokens: int) -> float:
        ids = torch.tensor(sources, device=torch_device)
        started = time.perf_counter()
        with torch.inference_mode():
            theirs.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                num_beams=1,
                do_sample=False,
            )
        if torch_device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return measure


def ctranslate2_seconds(model: Transformer, torch_device: str) -> Measure:
    """Return a measure of CTranslate2 with the same weights in fp16.

    Raises:
        ImportError: If it is not installed.
        ValueError: If it was built without CUDA.
    """
    from benchmarks.engines.ctranslate2_model import write_model

    ctranslate2: Any = import_module("ctranslate2")
    with tempfile.TemporaryDirectory() as folder:
        write_model(model.float().cpu(), Path(folder))
        kind = torch_device.partition(":")[0]
        translator = ctranslate2.Translator(folder, device=kind, compute_type="float16" if kind == "cuda" else "float32")

    def measure(sources: Sequence[list[int]], num_tokens: int) -> float:
        texts = [[str(i) for i in source[:-1]] for source in sources]
        started = time.perf_counter()
        translator.translate_batch(
            texts, beam_size=1, max_decoding_length=num_tokens, min_decoding_length=num_tokens, max_batch_size=len(texts)
        )
        return time.perf_counter() - started

    return measure


def against_peers(
    device: Device, name: str, model: Transformer, graphs: DeviceModel, batches: Sequence[int], num_tokens: int, torch_device: str
) -> list[dict[str, Any]]:
    """Translate equal batches with Dragoman and with peers; return tokens a second, or the reason for a missing peer."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[graphs.precision]
    decoder = open_decoder(device, graphs, max(batches))
    measures: dict[str, Measure] = {"dragoman": lambda sources, count: our_seconds(decoder, graphs, sources, count)}
    makers: dict[str, Callable[[], Measure]] = {
        "transformers": lambda: transformers_seconds(model, half, torch_device),
        "ctranslate2": lambda: ctranslate2_seconds(model, torch_device),
    }
    missing = dict[str, str]()
    for peer, make in makers.items():
        try:
            measures[peer] = make()
        except Exception as error:  # a peer that does not start is left out, and named
            missing[peer] = f"{type(error).__name__}: {error}"
    found = []
    for batch in batches:
        sources = random_sources(graphs, batch, SOURCE_TOKENS, SOURCE_TOKENS)
        times: dict[str, list[float]] = {peer: [] for peer in measures}
        for turn in range(4):
            for peer, measure in measures.items():
                seconds = measure(sources, num_tokens)
                if turn:  # the first time is for warming up
                    times[peer].append(seconds)
        row: dict[str, Any] = {"model": name, "batch": batch, "tokens_each": num_tokens}
        row |= {peer: round(batch * num_tokens / statistics.median(values)) for peer, values in times.items()}
        if "transformers" in measures:
            row["times transformers"] = round(row["dragoman"] / row["transformers"], 1)
        found.append(row | missing)
    return found
