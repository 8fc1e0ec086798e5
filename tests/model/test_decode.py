"""The eager search that training and export compare with, translations of texts, their scores, and the nearest candidate."""

import math

import pytest
import sacrebleu
import torch

from dragoman.model.corpus import DataError
from dragoman.model.decode import Start, StepDecoder, beam_search, greedy_search, pad
from dragoman.model.errors import InputError
from dragoman.model.evaluate import target_log_probs, translate
from dragoman.model.networks.attention import padding_mask
from dragoman.model.networks.language_model import LanguageModel
from dragoman.model.networks.transformer import Transformer
from dragoman.model.quality import choose_nearest, score
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from tests.model.families import ragged, random_pair

SOURCES = [[7, 8, 9, 10, 11], [12], [13, 14, 15], []]


def some_targets(model: Transformer, num_rows: int, length: int) -> torch.Tensor:
    ids = torch.randint(0, model.config.target_vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = model.config.decoder_start_id
    return ids


@torch.inference_mode()
def test_cached_decoding_equals_full_decoding_at_every_position_and_alone(any_model: Transformer) -> None:
    """So targets see only the past, and padding is never seen."""
    config = any_model.config
    rows = [[*ids, config.eos_id] for ids in SOURCES]
    targets = some_targets(any_model, len(rows), 9)
    memory, mask = any_model.encode(pad(rows, config.pad_id), torch.tensor([len(row) for row in rows]))
    full = any_model.decoder.log_probs(any_model.decode(targets, memory, mask))
    together, alone = StepDecoder(any_model, SOURCES), [StepDecoder(any_model, [source]) for source in SOURCES]
    for position in range(targets.shape[1]):
        step = together.step(targets[:, position])
        torch.testing.assert_close(step, full[:, position], atol=1e-5, rtol=0)
        steps = torch.cat([decoder.step(targets[row : row + 1, position]) for row, decoder in enumerate(alone)])
        torch.testing.assert_close(step, steps, atol=1e-5, rtol=0)
    if config.padding == "masked":
        assert (step.exp().sum(-1) < 1 - 1e-3).all(), "the softmax is over padding, too"
    else:
        torch.testing.assert_close(step.exp().sum(-1), torch.ones(4))
    assert (step[:, config.pad_id] == -math.inf).all() == (config.padding != "predicted")


def continue_by_hand(model: Transformer, source: list[int], ids: list[int], limit: int) -> list[tuple[int, float]]:
    """Choose the likeliest token again and again, with the whole model each time; padding is excluded."""
    steps: list[tuple[int, float]] = []
    while len(steps) < limit and (not steps or steps[-1][0] != model.config.eos_id):
        fed = torch.tensor([[*ids, *(token for token, _ in steps)]])
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), fed)[0, -1]
        logits[model.config.pad_id] = -math.inf
        log_probs = logits.log_softmax(-1)
        steps.append((int(log_probs.argmax()), float(log_probs.max())))
    return steps


@torch.inference_mode()
def test_forced_tokens_come_first_and_count_in_the_length_only(make_model) -> None:
    model, sources, forced = make_model(positions="relative"), [[7, 8, 9], [12], [13, 14]], [[], [5, 6], [9]]
    greedy, beams = greedy_search(model, sources, 6, Start(forced)), beam_search(model, sources, 2, 6, 0.7, Start(forced))
    for found, (best, *_), source, ids in zip(greedy, beams, sources, forced, strict=True):
        steps = continue_by_hand(model, [*source, model.config.eos_id], [model.config.decoder_start_id, *ids], 6)
        assert found.ids == [token for token, _ in steps if token != model.config.eos_id]
        assert found.log_probs == pytest.approx([log_prob for _, log_prob in steps], abs=1e-5)
        assert found.score == pytest.approx(sum(found.log_probs) / (len(steps) + len(ids)), abs=1e-5)
        assert best.score == pytest.approx(sum(best.log_probs) / (len(best.log_probs) + len(ids)) ** 0.7, abs=1e-5)


@pytest.mark.parametrize(("most", "forced", "lengths"), [(4, [[], [], []], [4, 4, 4]), (5, [[4, 5], [], [6]], [3, 5, 4])])
def test_search_stops_at_the_models_last_position(make_model, most: int, forced: list[list[int]], lengths: list[int]) -> None:
    model = make_model(max_target_positions=most, has_output_bias=True)
    model.decoder.output_bias.data[model.config.eos_id] = -100.0
    start = Start(forced=forced)
    assert [len(h.ids) for h in greedy_search(model, SOURCES[:3], 99, start)] == lengths
    assert [{len(h.ids) for h in beam} for beam in beam_search(model, SOURCES[:3], 2, 99, start=start)] == [{n} for n in lengths]


def test_end_of_sequence_is_scored_but_not_returned(make_model) -> None:
    model = make_model(has_output_bias=True)
    model.decoder.output_bias.data[model.config.eos_id] = 100.0
    for found in (greedy_search(model, [[5]], 9)[0], beam_search(model, [[5]], 2, 9)[0][0]):
        assert found.ids == [] and found.log_probs == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_prompt_takes_the_room_of_its_answer(make_model, positions) -> None:
    sizes = {"max_source_positions": 10, "max_target_positions": 10, "num_heads": 1, "has_output_bias": True}
    model = make_model(architecture="decoder", positions=positions, **sizes)
    model.decoder.output_bias.data[model.config.eos_id] = -100.0
    prompts, rooms = [[7, 8, 9], [], [5, 4, 3, 2, 9, 9, 9, 9, 9]], [7, 10, 1]
    assert [len(found.log_probs) for found in greedy_search(model, prompts, 99)] == rooms
    assert [max(len(found.log_probs) for found in beam) for beam in beam_search(model, prompts, 2, 99)] == rooms
    assert [len(found.log_probs) for found in greedy_search(model, prompts, 99, Start([[6, 6], [6, 6], []]))] == [5, 8, 1]
    assert [len(found.log_probs) for found in greedy_search(model, prompts, 6)] == [6, 6, 1]
    complete = greedy_search(model, [[2, 7, 8]], 99, Start(decoder_start_id=9, is_complete=True))
    assert complete[0].ids == greedy_search(model, prompts[:1], 99)[0].ids


@pytest.mark.parametrize(
    ("family", "penalty", "forced"),
    [("marian", 0.8, []), ("bart", 0.8, []), ("mbart", 1.3, [17]), ("t5", 1.3, [17]), ("umt5", 0.8, [])],
)
@torch.inference_mode()
def test_answers_are_those_of_transformers(family: str, penalty: float, forced: list[int]) -> None:
    """Greedy search and all of three beams, in double precision, so that no rounding decides a close call."""
    (theirs, ours), lengths = random_pair(family), [1, 9, 4, 30]
    sources = pad(ragged(lengths), 0)
    options = {"forced_bos_token_id": 17, "decoder_start_token_id": 5} if forced else {}
    options |= {"attention_mask": padding_mask(torch.tensor(lengths), sources.shape[1]).long(), "max_new_tokens": 12 + len(forced)}
    options |= {"bad_words_ids": [[0]] if ours.config.padding == "masked" else None, "length_penalty": penalty}
    options |= {"do_sample": False, "early_stopping": False, "return_dict_in_generate": True, "output_scores": True}
    start = Start([forced] * 4, decoder_start_id=5 if forced else None, is_complete=True)
    for width in (1, 3):
        expected = theirs.double().generate(input_ids=sources, num_beams=width, num_return_sequences=width, **options)
        if width == 1:
            found = greedy_search(ours.double(), ragged(lengths), 12, start)
        else:
            found = [found for beam in beam_search(ours.double(), ragged(lengths), 3, 12, penalty, start) for found in beam]
            assert [h.score for h in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-5)
        answers = [row[1 + len(forced) :] for row in expected.sequences.tolist()]
        assert [h.ids for h in found] == [row[: row.index(1)] if 1 in row else row for row in answers]


TEXTS = ["the dog runs", "snow", "a dog runs through the snow , through snow .", "über Straße"] * 20


@pytest.fixture(scope="module")
def model(make_model, tokenizer: ByteLevelTokenizer) -> Transformer:
    size = tokenizer.vocab_size  # an untied projection, or a random model repeats the start token whatever it reads
    return make_model(source_vocab_size=size, target_vocab_size=size, is_projection_tied=False, seed=1)


def test_answers_come_in_the_order_of_the_texts(model: Transformer, tokenizer: ByteLevelTokenizer) -> None:
    tokenizers, rows = Tokenizers.shared(tokenizer), [tokenizer.encode(text) for text in TEXTS[:4]]
    alone = [tokenizer.decode(greedy_search(model, [row], 6)[0].ids) for row in rows]
    assert len(set(alone)) > 2
    assert translate(model, tokenizers, TEXTS, max_new_tokens=6) == alone * 20 and translate(model, tokenizers, []) == []
    expected = [tokenizer.decode(beam[0].ids) for beam in beam_search(model, rows, 3, 6, 0.5)]
    assert translate(model, tokenizers, TEXTS[:4], num_beams=3, length_penalty=0.5, max_new_tokens=6) == expected
    longest = " ".join(["dog"] * 39)
    assert len(translate(model, tokenizers, [longest], max_new_tokens=1)) == 1
    with pytest.raises(InputError, match=r"line 2: 41 tokens, end-of-sequence included, where the model takes 40"):
        translate(model, tokenizers, ["snow", f"{longest} dog"])


def test_evaluation_scores_the_translations(make_model, tokenizer: ByteLevelTokenizer) -> None:
    size = tokenizer.vocab_size
    model = make_model(source_vocab_size=size, target_vocab_size=size, max_target_positions=12)
    texts = TEXTS[:4]
    answers = translate(model, Tokenizers.shared(tokenizer), texts)
    assert score(translate(model, Tokenizers.shared(tokenizer), texts), answers) == score(answers, answers) != score(answers, texts)
    assert score(translate(model, Tokenizers.shared(tokenizer), texts), texts) == score(answers, texts)


@pytest.mark.parametrize(("source", "target"), [("a a a", "a a"), ("a a a a", "a"), ("", "a a a")])
def test_a_prompt_and_what_follows_it_share_their_room(make_model, tokenizer: ByteLevelTokenizer, source: str, target: str) -> None:
    num_prompt, num_target = 1 + len(tokenizer.encode(source)), 1 + len(tokenizer.encode(target))
    longest, whole = num_prompt, num_prompt - 1 + num_target

    def model_of(max_source: int, max_target: int) -> LanguageModel:
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), tokenizer.vocab_size)
        return make_model(architecture="decoder", max_source_positions=max_source, max_target_positions=max_target, **sizes)

    tokenizers = Tokenizers.shared(tokenizer)
    (found,) = target_log_probs(model_of(longest, whole), tokenizers, [source], [target])
    assert len(found) == num_target
    with pytest.raises(InputError, match=rf"1: {num_prompt} source and {num_target} target .* {longest} and {num_target - 1}$"):
        target_log_probs(model_of(longest, whole - 1), tokenizers, [source], [target])
    if source:
        with pytest.raises(InputError, match=rf"line 1: {num_prompt} source and .* takes {longest - 1} and"):
            target_log_probs(model_of(longest - 1, whole), tokenizers, [source], [target])
        with pytest.raises(InputError, match=rf"line 1: {num_prompt} tokens, the start token included"):
            translate(model_of(longest - 1, whole), tokenizers, [source])


REFERENCES = ["the dog runs through the snow", "a man is reading a book today", "two children play in the park"]
HYPOTHESES = ["the dog runs in the snow", "a man reads a book today", "two children play in the Park now"]


def test_scores_are_sacrebleus_and_case_counts_unless_told_otherwise() -> None:
    scores = score(HYPOTHESES, REFERENCES)
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert f"case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}" in scores.bleu_signature
    assert f"case:mixed|eff:yes|nc:6|nw:0|space:no|version:{sacrebleu.__version__}" in scores.chrf_signature
    shouted = [text.upper() for text in REFERENCES]
    assert score(shouted, REFERENCES).bleu < 5
    lower = score(shouted, REFERENCES, is_lowercase=True)
    assert lower.bleu == pytest.approx(100.0) and "case:lc" in lower.bleu_signature
    for hypotheses, references, reason in (([], [], "no hypotheses"), (HYPOTHESES[:2], REFERENCES, "2 hypotheses .* 3 references")):
        with pytest.raises(InputError, match=reason):
            score(hypotheses, references)


CAPTIONS = ["A red cat sleeps on the mat .", "Two dogs run through deep snow ."]
CATS = ["A cat sleeps .", "A red cat is on the mat .", "A red cat sleeps on a mat ."]
DOGS = ["Dogs .", "Two dogs run .", "Two cats run through ."]
BEAMS = [*CATS, *DOGS]
SAMPLED = ["A red cat sleeps on the mat", "Two dogs run through deep snow ."]


@pytest.mark.parametrize(
    ("references", "candidates", "chosen"),
    [
        (CAPTIONS, {"beams": BEAMS, "sampled": SAMPLED}, SAMPLED),
        (CAPTIONS, {"beams": BEAMS}, [CATS[2], DOGS[1]]),
        (["A Dog barks"], {"x": ["a dog barks", "A Dog meows"]}, ["A Dog meows"]),
        (["a b c d e"], {"x": ["x a", "a x"], "y": ["a y"]}, ["x a"]),  # of equals the first
        (["a b c"], {"x": ["", "x y z", " "]}, ["x y z"]),
    ],
)
def test_the_nearest_candidate_is_chosen(references: list[str], candidates: dict[str, list[str]], chosen: list[str]) -> None:
    assert choose_nearest(references, candidates) == chosen
    for reference, best, other in zip(references, chosen, CAPTIONS, strict=False):
        if reference == other:  # as sacreBLEU's own function for a sentence scores them
            all_scores = [sacrebleu.sentence_bleu(text, [reference]).score for texts in candidates.values() for text in texts]
            assert sacrebleu.sentence_bleu(best, [reference]).score == max(all_scores)


@pytest.mark.parametrize(
    ("references", "candidates", "complaint"),
    [
        (CAPTIONS, {"beams": BEAMS, "drawn.de": BEAMS[:3]}, "drawn.de: 3 lines are not the same number for each of 2 references"),
        (CAPTIONS, {"beams.de": BEAMS[:1]}, "beams.de: 1 lines"),
        (["a", " "], {"x": ["a", "b"]}, "line 2 of the references is blank"),
        (["a", "b"], {"x": ["a", ""]}, "line 2 of the references: every candidate is blank"),
    ],
)
def test_candidates_that_do_not_fit_are_named(references: list[str], candidates: dict[str, list[str]], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        choose_nearest(references, candidates)
