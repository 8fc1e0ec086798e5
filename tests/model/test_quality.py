"""Translations of texts and their scores, and the choice of the candidate that is nearest to a reference."""

import pytest
import sacrebleu

from dragoman.model.config import ModelConfig
from dragoman.model.corpus import DataError
from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.errors import InputError
from dragoman.model.evaluate import evaluate, target_log_probs, translate
from dragoman.model.nearest import choose_nearest
from dragoman.model.networks.language_model import LanguageModel
from dragoman.model.networks.transformer import Transformer
from dragoman.model.quality import score
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

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
    assert evaluate(model, Tokenizers.shared(tokenizer), texts, answers) == score(answers, answers) != score(answers, texts)
    assert evaluate(model, Tokenizers.shared(tokenizer), texts, texts) == score(answers, texts)
    with pytest.raises(InputError, match="4 hypotheses cannot be scored against 3 references"):
        evaluate(model, Tokenizers.shared(tokenizer), texts, texts[:3])


@pytest.mark.parametrize(("source", "target"), [("a a a", "a a"), ("a a a a", "a"), ("", "a a a")])
def test_a_prompt_and_what_follows_it_share_their_room(source: str, target: str, tokenizer: ByteLevelTokenizer) -> None:
    num_prompt, num_target = 1 + len(tokenizer.encode(source)), 1 + len(tokenizer.encode(target))
    longest, whole = num_prompt, num_prompt - 1 + num_target

    def model_of(max_source: int, max_target: int) -> LanguageModel:
        sizes = {"d_model": 16, "num_heads": 2, "num_decoder_layers": 1, "decoder_ffn_dim": 16}
        sizes |= dict.fromkeys(("source_vocab_size", "target_vocab_size"), tokenizer.vocab_size)
        sizes |= {"max_source_positions": max_source, "max_target_positions": max_target}
        return LanguageModel(ModelConfig(architecture="decoder", **sizes)).eval()

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
    assert scores.to_dict() == {name: getattr(scores, name) for name in ("bleu", "bleu_signature", "chrf", "chrf_signature")}
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
