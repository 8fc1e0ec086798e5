import math

import pytest
import torch

from dragoman.model.config import ModelConfig
from dragoman.model.decode import Start, StepDecoder, beam_search, greedy_search, length_normalised
from dragoman.model.networks.eager_cache import EagerCache
from dragoman.model.networks.language_model import LanguageModel
from dragoman.model.networks.transformer import Transformer
from dragoman.model.padding import pad

SOURCES = [[7, 8, 9, 10, 11], [12], [13, 14, 15], []]


def some_targets(model: Transformer, num_rows: int, length: int) -> torch.Tensor:
    """Rows of tokens, the start token first."""
    ids = torch.randint(0, model.config.target_vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = model.config.decoder_start_id
    return ids


@torch.inference_mode()
def test_cached_decoding_equals_full_decoding_at_every_position(any_model: Transformer) -> None:
    config = any_model.config
    rows = [[*ids, config.eos_id] for ids in SOURCES]
    lengths = torch.tensor([len(row) for row in rows])
    targets = some_targets(any_model, len(rows), 9)
    memory, mask = any_model.encode(pad(rows, config.pad_id), lengths)
    full = any_model.decoder.log_probs(any_model.decode(targets, memory, mask))
    decoder = StepDecoder(any_model, SOURCES)
    for position in range(targets.shape[1]):
        step = decoder.step(targets[:, position])
        torch.testing.assert_close(step, full[:, position], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_row_alone_equals_row_in_a_padded_batch(any_model: Transformer) -> None:
    targets = some_targets(any_model, len(SOURCES), 6)
    together = StepDecoder(any_model, SOURCES)
    alone = [StepDecoder(any_model, [source]) for source in SOURCES]
    for position in range(targets.shape[1]):
        steps = torch.cat([decoder.step(targets[row : row + 1, position]) for row, decoder in enumerate(alone)])
        torch.testing.assert_close(together.step(targets[:, position]), steps, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_selected_rows_keep_their_own_past(make_model) -> None:
    model = make_model()
    targets = some_targets(model, len(SOURCES), 6)
    straight, selected = StepDecoder(model, SOURCES), StepDecoder(model, SOURCES)
    rows = torch.tensor([2, 0, 0])
    for position in range(3):
        straight.step(targets[:, position])
        selected.step(targets[:, position])
    selected.steps.select(rows)
    expected = straight.step(targets[:, 3])[rows]
    torch.testing.assert_close(selected.step(targets[rows, 3]), expected, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_selecting_before_the_first_step_moves_the_sources(make_model) -> None:
    model = make_model()
    decoder = StepDecoder(model, SOURCES)
    decoder.steps.select(torch.tensor([1]))
    start = torch.tensor([model.config.decoder_start_id])
    torch.testing.assert_close(decoder.step(start), StepDecoder(model, [SOURCES[1]]).step(start), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_steps_are_distributions_but_for_padding(any_model: Transformer) -> None:
    step = StepDecoder(any_model, SOURCES).step(torch.full((4,), any_model.config.decoder_start_id))
    padding = any_model.config.padding
    if padding == "masked":
        assert (step.exp().sum(-1) < 1 - 1e-3).all(), "the softmax is over padding, too"
    else:
        torch.testing.assert_close(step.exp().sum(-1), torch.ones(4))
    assert (step[:, any_model.config.pad_id] == -math.inf).all() == (padding != "predicted")


@torch.inference_mode()
def test_cache_grows_by_one_position_a_step(make_model) -> None:
    cache = EagerCache(make_model().config, [], torch.ones(1, 1, dtype=torch.bool))
    cache.self_kv = [None]
    for length in (1, 2, 3):
        assert cache.self_attention(0, torch.randn(1, 1, 48), None).shape == (1, 1, 16)
        assert cache.self_kv[0] is not None
        assert [x.shape for x in cache.self_kv[0]] == [(1, 4, length, 4)] * 2


def greedy_by_hand(model: Transformer, source: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
    """Run the whole model anew for each token of one source."""
    config = model.config
    source_ids = torch.tensor([[*source, config.eos_id]])
    ids, log_probs = [config.decoder_start_id], []
    while len(log_probs) < max_new_tokens and (len(ids) == 1 or ids[-1] != config.eos_id):
        logits = model(source_ids, torch.tensor([source_ids.shape[1]]), torch.tensor([ids]))[0, -1]
        if config.padding == "excluded":
            logits[config.pad_id] = -math.inf
        steps = logits.log_softmax(-1)
        if config.padding == "masked":
            steps[config.pad_id] = -math.inf
        ids.append(int(steps.argmax()))
        log_probs.append(float(steps.max()))
    return ids[1:], log_probs


@torch.inference_mode()
def test_greedy_search_takes_the_likeliest_token(any_model: Transformer) -> None:
    for source, found in zip(SOURCES, greedy_search(any_model, SOURCES, 12), strict=True):
        ids, log_probs = greedy_by_hand(any_model, source, 12)
        assert found.ids == [i for i in ids if i != any_model.config.eos_id]
        assert found.log_probs == pytest.approx(log_probs, abs=1e-5)
        assert found.score == pytest.approx(sum(log_probs) / len(log_probs), abs=1e-5)


@pytest.mark.parametrize("positions", ["learned", "relative"])
@torch.inference_mode()
def test_forced_tokens_come_first_and_count_in_the_length_only(make_model, positions) -> None:
    """A forced token is one that the model is told to have said; what follows is what it would say after saying it."""
    model, sources = make_model(positions=positions), [[7, 8, 9], [12], [13, 14]]
    forced = [[], [5, 6], [9]]
    for greedy, (best, *_), source, ids in zip(
        greedy_search(model, sources, 6, Start(forced)),
        beam_search(model, sources, 2, 6, 0.7, Start(forced)),
        sources,
        forced,
        strict=True,
    ):
        steps = continue_by_hand(model, [*source, model.config.eos_id], [model.config.decoder_start_id, *ids], 6)
        assert greedy.ids == [token for token, _ in steps if token != model.config.eos_id]
        assert greedy.log_probs == pytest.approx([log_prob for _, log_prob in steps], abs=1e-5)
        assert greedy.score == pytest.approx(sum(greedy.log_probs) / (len(steps) + len(ids)), abs=1e-5)
        assert best.score == pytest.approx(sum(best.log_probs) / (len(best.log_probs) + len(ids)) ** 0.7, abs=1e-5)


def continue_by_hand(model: Transformer, source: list[int], ids: list[int], limit: int) -> list[tuple[int, float]]:
    """Choose the likeliest token again and again, with the whole model each time."""
    steps: list[tuple[int, float]] = []
    while len(steps) < limit and (not steps or steps[-1][0] != model.config.eos_id):
        memory = model.encode(torch.tensor([source]), torch.tensor([len(source)]))
        log_probs = model.decoder.log_probs(model.decode(torch.tensor([[*ids, *(token for token, _ in steps)]]), *memory))[0, -1]
        steps.append((int(log_probs.argmax()), float(log_probs.max())))
    return steps


@torch.inference_mode()
def test_complete_sources_and_another_start_are_taken_as_they_are(make_model) -> None:
    model = make_model()
    plain = greedy_search(model, [[7, 8], [9]], 8)
    assert greedy_search(model, [[7, 8, 1], [9, 1]], 8, Start(is_complete=True)) == plain
    with_suffix = greedy_search(model, [[3, 7, 8, 1, 4]], 8, Start(is_complete=True, decoder_start_id=6))
    steps = continue_by_hand(model, [3, 7, 8, 1, 4], [6], 8)
    assert with_suffix[0].log_probs == pytest.approx([log_prob for _, log_prob in steps], abs=1e-5)
    assert with_suffix != greedy_search(model, [[3, 7, 8, 1, 4]], 8, Start(is_complete=True))
    assert beam_search(model, [[7, 8, 1]], 3, 8, start=Start(is_complete=True)) == beam_search(model, [[7, 8]], 3, 8)


def test_forced_tokens_take_room_of_the_models_positions(make_model) -> None:
    model = make_model(max_target_positions=5, has_output_bias=True)
    model.decoder.output_bias.data[model.config.eos_id] = -100.0
    start = Start(forced=[[4, 5], []])
    assert [len(h.ids) for h in greedy_search(model, [[7], [8]], 99, start)] == [3, 5]
    assert [{len(h.ids) for h in beam} for beam in beam_search(model, [[7], [8]], 2, 99, start=start)] == [{3}, {5}]


def test_beam_of_one_is_greedy(any_model: Transformer) -> None:
    greedy = greedy_search(any_model, SOURCES, 12)
    beams = beam_search(any_model, SOURCES, 1, 12)
    assert [beam[0].ids for beam in beams] == [hypothesis.ids for hypothesis in greedy]
    assert [beam[0].score for beam in beams] == pytest.approx([hypothesis.score for hypothesis in greedy], abs=1e-5)


def test_batch_does_not_change_a_beam(make_model) -> None:
    model = make_model(has_output_bias=True)
    together = beam_search(model, SOURCES, 3, 12, 1.2)
    for source, expected in zip(SOURCES, together, strict=True):
        (alone,) = beam_search(model, [source], 3, 12, 1.2)
        assert [h.ids for h in alone] == [h.ids for h in expected]
        assert [h.score for h in alone] == pytest.approx([h.score for h in expected], abs=1e-5)


def test_wide_beam_finds_the_best_of_all_sequences(make_model) -> None:
    """With a beam as wide as the vocabulary to the power of the length, nothing is ever dropped."""
    model = make_model(source_vocab_size=5, target_vocab_size=5, seed=3)
    every = [[]]
    for _ in range(3):
        every += [[*prefix, token] for prefix in every for token in (2, 3, 4) if [*prefix, token] not in every]
    totals = {}
    with torch.inference_mode():
        for ids in (ids for ids in every if len(ids) <= 3):
            decoder = StepDecoder(model, [[3, 4]])
            inputs = [2, *ids]
            outputs = [*ids, 1] if len(ids) < 3 else ids
            steps = [float(decoder.step(torch.tensor([i]))[0, o]) for i, o in zip(inputs, outputs, strict=False)]
            totals[tuple(ids)] = sum(steps) / len(steps)
    (beam,) = beam_search(model, [[3, 4]], 40, 3)
    best = max(totals, key=lambda ids: totals[ids])
    assert tuple(beam[0].ids) == best
    assert beam[0].score == pytest.approx(totals[best], abs=1e-5)
    assert {tuple(h.ids) for h in beam} == set(totals)


def test_search_stops_at_the_models_last_position(make_model) -> None:
    model = make_model(max_target_positions=4, has_output_bias=True)
    model.decoder.output_bias.data[model.config.eos_id] = -100.0
    assert [len(h.ids) for h in greedy_search(model, SOURCES, 99)] == [4] * 4
    assert {len(h.ids) for beam in beam_search(model, SOURCES, 2, 99) for h in beam} == {4}


def test_end_of_sequence_is_scored_but_not_returned(make_model) -> None:
    model = make_model(has_output_bias=True)
    model.decoder.output_bias.data[model.config.eos_id] = 100.0
    for hypothesis in (greedy_search(model, [[5]], 9)[0], beam_search(model, [[5]], 2, 9)[0][0]):
        assert hypothesis.ids == []
        assert hypothesis.log_probs == pytest.approx([0.0], abs=1e-6)


def test_scores_are_normalised_log_probabilities(make_model) -> None:
    for penalty in (0.0, 0.6, 1.0, 1.4):
        for hypothesis in beam_search(make_model(), [[5, 6]], 3, 7, penalty)[0]:
            length = len(hypothesis.log_probs)
            assert hypothesis.score == pytest.approx(sum(hypothesis.log_probs) / length**penalty, abs=1e-5)


def test_length_normalised_follows_its_formula() -> None:
    assert length_normalised(-6.0, 4, 0.0) == -6.0
    assert length_normalised(-6.0, 4, 1.0) == -1.5
    assert length_normalised(-6.0, 4, 0.5) == -3.0


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_prompt_takes_the_room_of_its_answer(positions) -> None:
    torch.manual_seed(0)
    sizes = {"source_vocab_size": 40, "target_vocab_size": 40, "max_source_positions": 10, "max_target_positions": 10}
    model = LanguageModel(
        ModelConfig(architecture="decoder", d_model=16, num_heads=1, num_decoder_layers=1, positions=positions, **sizes)
    ).eval()
    with torch.no_grad():
        model.decoder.tokens.weight[model.config.eos_id] = 0  # whatever else is likelier
    prompts = [[7, 8, 9], [], [5, 4, 3, 2, 9, 9, 9, 9, 9]]
    rooms = [7, 10, 1]
    assert [len(found.log_probs) for found in greedy_search(model, prompts, 99)] == rooms
    beams = beam_search(model, prompts, 2, 99)
    assert [max(len(found.log_probs) for found in beam) for beam in beams] == rooms
    forced = [[6, 6], [6, 6], []]
    assert [len(found.log_probs) for found in greedy_search(model, prompts, 99, Start(forced))] == [5, 8, 1]
    assert [len(found.log_probs) for found in greedy_search(model, prompts, 6)] == [6, 6, 1]
    complete = greedy_search(model, [[2, 7, 8]], 99, Start(decoder_start_id=9, is_complete=True))
    assert complete[0].ids == greedy_search(model, prompts[:1], 99)[0].ids
