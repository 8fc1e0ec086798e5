"""Checks: the device's answers against eager PyTorch, and captured steps against uncaptured ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.models import greedy, open_decoder, random_sources
from dragoman.model.decode import Hypothesis, greedy_search
from dragoman.model.networks.transformer import Transformer
from dragoman.server.runtime.device.device import Device
from dragoman.server.runtime.device.model import DeviceModel
from dragoman.server.runtime.device.runner import DeviceRunner

MAX_NEW_TOKENS, EAGER_BATCH, NUM_SLOTS = 96, 100, 64
NUM_REPLAYED_STEPS = 6


def answers_against_eager(
    device: Device, graphs: DeviceModel, models: dict[str, Transformer], sources: Sequence[list[int]], torch_device: str
) -> tuple[dict[str, Any], list[list[int]]]:
    """Decode sources on the device, ragged, and with eager models.

    Args:
        device: Device of the graphs.
        graphs: Graphs of the model.
        models: Eager models to compare with, by name.
        sources: End-of-sequence included.
        torch_device: Device of the eager models.

    Returns:
        For each eager model the share of answers that are the same, and the largest difference of a log-probability up to where
        two answers part; and the device's answers, end-of-sequence left out.
    """
    answers = greedy(open_decoder(device, graphs, NUM_SLOTS), graphs, sources, MAX_NEW_TOKENS)
    found: dict[str, Any] = {"answers": len(sources), "tokens": sum(len(tokens) for tokens, _ in answers)}
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for name, model in models.items():
        placed = model.to(torch_device)
        expected: dict[int, Hypothesis] = {}
        for start in range(0, len(order), EAGER_BATCH):
            chunk = order[start : start + EAGER_BATCH]
            bare = [sources[i][:-1] for i in chunk]
            expected |= dict(zip(chunk, greedy_search(placed, bare, MAX_NEW_TOKENS), strict=True))
        num_same, largest = 0, 0.0
        for i, (tokens, log_probs) in enumerate(answers):
            theirs = [*expected[i].ids, graphs.eos_id][: len(expected[i].log_probs)]
            num_same += tokens == theirs
            for ours, other, a, b in zip(tokens, theirs, log_probs, expected[i].log_probs, strict=False):
                if ours != other:
                    break
                largest = max(largest, abs(a - b))
        found |= {f"same as {name}": num_same / len(sources), f"log-probability off {name}": largest}
    return found, [[token for token in tokens if token != graphs.eos_id] for tokens, _ in answers]


def replay_against_plain(device: Device, graphs: DeviceModel, max_rows: int) -> dict[str, Any]:
    """Compare captured with uncaptured steps, bit for bit, in every bucket of rows and candidates and at a row less.

    Returns:
        Number of compared steps, and the shapes that differed.
    """
    captured = open_decoder(device, graphs, max_rows, is_ahead=False)
    plain = open_decoder(device, graphs, max_rows, is_ahead=False, has_graphs=False)
    sources = random_sources(graphs, max_rows, 3, 40, seed=7)
    num_steps, different = 0, list[str]()
    for num_rows in sorted({max(1, rows - less) for rows in captured.buckets.rows for less in (0, 1)}):
        for decoder in (captured, plain):
            decoder.prefill(sources[:num_rows], list(range(num_rows)))
        tokens = np.full(num_rows, graphs.decoder_start_id, np.int64)
        positions = np.arange(num_rows, dtype=np.int64) % 3  # ragged
        for step in range(NUM_REPLAYED_STEPS):
            num_candidates = captured.buckets.candidates[step % len(captured.buckets.candidates)]
            one = captured.step(tokens, positions, num_candidates)
            other = plain.step(tokens, positions, num_candidates)
            num_steps += 1
            if one.ids.tobytes() != other.ids.tobytes() or one.log_probs.tobytes() != other.log_probs.tobytes():
                different.append(f"{num_rows} rows, {num_candidates} candidates, step {step}")
            tokens, positions = one.ids[:, 0].copy(), positions + 1
    return {"steps": num_steps, "different": len(different), "first of them": "; ".join(different[:10])}


def ahead_against_asked(device: Device, graphs: DeviceModel, num_rows: int) -> dict[str, Any]:
    """Compare steps that are begun ahead with steps that are asked for, bit for bit."""
    sources = random_sources(graphs, num_rows, 3, 40, seed=8)
    results: list[list[bytes]] = []
    decoders: list[DeviceRunner] = []
    for is_ahead in (True, False):
        decoder = open_decoder(device, graphs, num_rows, is_ahead=is_ahead)
        decoder.prefill(sources, list(range(num_rows)))
        tokens, positions = np.full(num_rows, graphs.decoder_start_id, np.int64), np.zeros(num_rows, np.int64)
        bits = []
        for _ in range(32):
            found = decoder.step(tokens, positions, 1)
            bits.append(found.ids.tobytes() + found.log_probs.tobytes())
            tokens, positions = found.ids[:, 0].copy(), positions + 1
        results.append(bits)
        decoders.append(decoder)
    return {"same": results[0] == results[1], "begun ahead": decoders[0].num_ahead, "taken": decoders[0].num_taken}


def mixed_searches(device: Device, graphs: DeviceModel, num_requests: int) -> dict[str, Any]:
    """Run requests of all searches together, and each alone; return the share of requests that are answered alike.

    Raises:
        ImportError: If the engine's libraries are not there.
    """
    from dragoman.server.engine.engine import Engine
    from dragoman.server.engine.messages import Finished, Request, Sampling, SearchOptions
    from dragoman.server.engine.search.hypothesis import TargetSide
    from dragoman.server.engine.settings import Limits
    from dragoman.server.runtime.device.model import Buckets
    from dragoman.server.runtime.device.runner import DeviceRunner

    sizes = graphs.target_vocab_size, graphs.max_target_tokens, graphs.max_source_tokens
    runner = DeviceRunner(device, graphs, Buckets.of(NUM_SLOTS, *sizes), prefill_tokens=8192)
    runner.warm_up()
    target = TargetSide(graphs.target_vocab_size, graphs.eos_id, graphs.decoder_start_id, graphs.max_target_tokens)
    searches = (
        SearchOptions(),
        SearchOptions(num_beams=4, num_answers=2),
        SearchOptions(sampling=Sampling(11)),
        SearchOptions(repetition_penalty=1.2),
        SearchOptions(num_beams=2),
    )

    def run(requests: Sequence[Any]) -> dict[int, Finished]:
        engine = Engine(runner, Limits(NUM_SLOTS, 4096), target)
        for request in requests:
            engine.submit(request)
        finished: dict[int, Finished] = {}
        while engine.has_work:
            engine.step()
            finished |= {end.id: end for end in engine.take_report().finished}
        return finished

    sources = random_sources(graphs, num_requests, 3, 30, seed=9)
    requests = [Request(i, source, 24, 0.0, search=searches[i % len(searches)]) for i, source in enumerate(sources)]
    together = run(requests)
    num_same = num_failed = 0
    for request in requests:
        alone = run([request])[request.id]
        ours = together[request.id]
        num_failed += ours.reason not in ("eos", "length")
        num_same += [answer.token_ids for answer in ours.answers] == [answer.token_ids for answer in alone.answers]
    return {"requests": num_requests, "same together and alone": num_same / num_requests, "failed": num_failed}


def eager_models(model: Transformer, half: torch.dtype, name: str) -> dict[str, Transformer]:
    """Return a model in single and in half precision, by name."""
    from dragoman.export.half import halved

    return {f"eager {name}": halved(model, half), "eager fp32": model}
