import pytest

from dragoman.model.config import ModelConfig
from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.errors import InputError
from dragoman.model.evaluate import evaluate, target_log_probs, translate
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
    alone = [tokenizer.decode(greedy_search(model, [tokenizer.encode(text)], 6)[0].ids) for text in TEXTS[:4]]
    assert len(set(alone)) > 2
    assert translate(model, Tokenizers.shared(tokenizer), TEXTS, max_new_tokens=6) == alone * 20


def test_beam_answers_are_the_best_of_each_beam(model: Transformer, tokenizer: ByteLevelTokenizer) -> None:
    beams = beam_search(model, [tokenizer.encode(text) for text in TEXTS[:4]], 3, 6, 0.5)
    expected = [tokenizer.decode(beam[0].ids) for beam in beams]
    assert translate(model, Tokenizers.shared(tokenizer), TEXTS[:4], num_beams=3, length_penalty=0.5, max_new_tokens=6) == expected


def test_no_texts_give_no_answers(model: Transformer, tokenizer: ByteLevelTokenizer) -> None:
    assert translate(model, Tokenizers.shared(tokenizer), []) == []


def test_text_too_long_for_the_model_is_numbered(model: Transformer, tokenizer: ByteLevelTokenizer) -> None:
    longest = " ".join(["dog"] * 39)
    assert len(translate(model, Tokenizers.shared(tokenizer), [longest], max_new_tokens=1)) == 1
    with pytest.raises(InputError, match=r"line 2: 41 tokens, end-of-sequence included, where the model takes 40"):
        translate(model, Tokenizers.shared(tokenizer), ["snow", f"{longest} dog"])


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
    """What just fits is scored; a position less on either side, and it is refused, as servers refuse it."""
    num_prompt, num_target = 1 + len(tokenizer.encode(source)), 1 + len(tokenizer.encode(target))
    longest, whole = num_prompt, num_prompt - 1 + num_target

    def model_of(max_source: int, max_target: int) -> LanguageModel:
        sizes = {"d_model": 16, "num_heads": 2, "num_decoder_layers": 1, "decoder_ffn_dim": 16}
        limits = {"max_source_positions": max_source, "max_target_positions": max_target}
        size = tokenizer.vocab_size
        config = ModelConfig(architecture="decoder", source_vocab_size=size, target_vocab_size=size, **sizes, **limits)
        return LanguageModel(config).eval()

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
