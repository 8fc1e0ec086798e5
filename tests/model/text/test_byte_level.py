import itertools
import json
import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dragoman.model.corpus import read_lines
from dragoman.model.text.alphabet import byte_alphabet
from dragoman.model.text.byte_level import EOS, PAD, SPECIAL_TOKENS, START, ByteLevelTokenizer, StreamingDetokenizer
from dragoman.model.text.tokenizer import TokenizerError
from tests.examples import num_examples

PIECES = [
    "</s>",
    "<s>",
    "<pad>",
    "▁",
    " ",
    "  ",
    "\0",
    "\n",
    "\r\n",
    "\t",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "e\u0301",
    "é",
    "\u0301",
    "\ufeff",
    "\u2028",
    "ﷺ",
    "the",
    " dog",
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=8).map("".join))
MANY = settings(max_examples=num_examples(1_500, of=10_000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
SOME = settings(MANY, max_examples=num_examples(300, of=1_000))


@MANY
@given(text=TEXTS)
@example(text="")
@example(text=" ")
@example(text="</s>")
@example(text=" </s> <pad><s>▁▁ ")
@example(text="\0")
@example(text="e\u0301👩‍👩‍👧‍👦")
def test_any_text_comes_back(tokenizer: ByteLevelTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert {tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id}.isdisjoint(ids)


@SOME
@given(texts=st.lists(TEXTS, max_size=5))
def test_batch_encodes_each_text_as_alone(tokenizer: ByteLevelTokenizer, texts: list[str]) -> None:
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_corpus_comes_back(multi30k, tokenizer: ByteLevelTokenizer) -> None:
    for name in ("train.en.gz", "train.de.gz", "train.fr.gz", "val.de.gz", "test_2016_flickr.fr.gz"):
        lines = read_lines(multi30k / name)
        assert list(map(tokenizer.decode, tokenizer.encode_batch(lines))) == lines


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Cut ids at the given places, some pieces empty."""
    places = [0, *sorted(min(place, len(ids)) for place in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(places)]


@settings(MANY, max_examples=num_examples(600, of=3_000))
@given(data=st.data())
def test_pieces_of_any_ids_add_up(tokenizer: ByteLevelTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 20), max_size=5)))
    stream = StreamingDetokenizer(tokenizer)
    streamed = "".join([stream.push(piece) for piece in pieces] + [stream.finish()])
    in_bytes = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace").removeprefix(" ")
    assert streamed == tokenizer.decode(ids) == in_bytes


@SOME
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text), cuts=st.lists(st.integers(0, 60), max_size=8))
@example(text="👩‍👩‍👧‍👦 雪", cuts=list(range(40)))
def test_pieces_never_hold_half_a_character(tokenizer: ByteLevelTokenizer, text: str, cuts: list[int]) -> None:
    stream = StreamingDetokenizer(tokenizer)
    pieces = [stream.push(piece) for piece in cut(tokenizer.encode(text), cuts)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


@SOME
@given(text=TEXTS)
def test_each_piece_is_all_that_is_certain(tokenizer: ByteLevelTokenizer, text: str) -> None:
    """After each token the pieces so far are the longest whole-character prefix of the bytes so far."""
    stream, seen, shown = StreamingDetokenizer(tokenizer), b"", ""
    for token in tokenizer.encode(text):
        seen += tokenizer.token_bytes(token)
        shown += stream.push([token])
        assert shown == seen.decode("utf-8", "ignore").removeprefix(" ")


def test_incomplete_character_is_replaced_at_the_end_only(tokenizer: ByteLevelTokenizer) -> None:
    first_byte = tokenizer.encoder.token_to_id({byte: char for char, byte in byte_alphabet().items()}[0xF0])
    stream = StreamingDetokenizer(tokenizer)
    assert stream.push([first_byte]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_silent_in_output(tokenizer: ByteLevelTokenizer) -> None:
    ids = tokenizer.encode("the dog")
    noisy = [tokenizer.start_id, *ids[:1], tokenizer.pad_id, *ids[1:], tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(noisy) == "the dog"


def test_ids_that_only_pad_a_models_vocabulary_are_silent(tokenizer: ByteLevelTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("the dog"), tokenizer.vocab_size, tokenizer.vocab_size + 7]) == "the dog"


def test_special_tokens_come_first(tokenizer: ByteLevelTokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id) == (0, 1, 2)
    assert [tokenizer.encoder.token_to_id(token) for token in (PAD, EOS, START)] == [0, 1, 2]


def test_every_byte_is_a_token(tokenizer: ByteLevelTokenizer) -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    singles = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles


def test_word_is_the_same_token_at_the_start_and_inside(tokenizer: ByteLevelTokenizer) -> None:
    dog, inside = tokenizer.encode("dog"), tokenizer.encode("the dog runs")
    assert len(dog) == 1
    assert inside[1:2] == dog
    assert tokenizer.encode("runs") == inside[2:]


@SOME
@given(text=TEXTS)
def test_loaded_tokenizer_gives_the_same_ids(tokenizer: ByteLevelTokenizer, reloaded: ByteLevelTokenizer, text: str) -> None:
    assert reloaded.encode(text) == tokenizer.encode(text)


@pytest.fixture(scope="module")
def reloaded(tokenizer: ByteLevelTokenizer, tmp_path_factory: pytest.TempPathFactory) -> ByteLevelTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    return ByteLevelTokenizer.load(folder)


TRAINING = """
import hashlib, random
from dragoman.model.text.byte_level import ByteLevelTokenizer
rng = random.Random(7)
words = ["".join(rng.choices("abcdefghäöüß雪", k=rng.randint(1, 9))) for _ in range(400)]
tokenizer = ByteLevelTokenizer.train([" ".join(rng.choices(words, k=10)) for _ in range(300)], 600)
print(hashlib.sha256(tokenizer.encoder.to_str().encode()).hexdigest(), tokenizer.vocab_size)
"""


def test_training_twice_gives_the_same_vocabulary() -> None:
    """In processes of their own, where hash tables are seeded differently."""
    answers = {
        subprocess.run([sys.executable, "-c", TRAINING], check=True, capture_output=True, text=True).stdout for _ in range(3)
    }
    assert len(answers) == 1
    assert answers.pop().endswith(" 600\n")


def made_up(seed: int) -> list[str]:
    """Return sentences of two hundred words of the seed's own."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghäöüß雪", k=rng.randint(2, 9))) for _ in range(200)]
    return [" ".join(rng.choices(words, k=10)) for _ in range(300)]


def test_more_tokens_of_the_same_texts_leave_the_first_ones_as_they_are() -> None:
    texts = made_up(1)
    small = ByteLevelTokenizer.train(texts, 350)
    large = small.extended(texts, 600)
    assert (small.vocab_size, large.vocab_size) == (350, 600)
    assert all(large.token_bytes(i) == small.token_bytes(i) for i in range(350))
    pieces = small.pieces_of(large)
    assert [b"".join(map(small.token_bytes, ids)) for ids in pieces] == [large.token_bytes(i) for i in range(350, 600)]
    assert min(map(len, pieces)) > 1
    assert sum(map(len, large.encode_batch(texts))) < sum(map(len, small.encode_batch(texts)))


@pytest.mark.parametrize(
    ("seed", "size", "complaint"),
    [
        (2, 600, "learnt from other texts"),
        (1, 100_000, r"of these texts \d+ tokens can be learnt, not 100000"),
        (1, 300, "350 tokens already, 300 are fewer"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(seed: int, size: int, complaint: str) -> None:
    with pytest.raises(TokenizerError, match=complaint):
        ByteLevelTokenizer.train(made_up(1), 350).extended(made_up(seed), size)


def test_training_learns_no_token_out_of_a_special_one() -> None:
    tokenizer = ByteLevelTokenizer.train([" ".join(SPECIAL_TOKENS * 3)] * 50, 400)
    ids = tokenizer.encode("</s>")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "</s>"


def test_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        ByteLevelTokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 1}'])
def test_damaged_file_is_named(tmp_path, content) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a byte-level tokeniser"):
        ByteLevelTokenizer.load(tmp_path)


def test_file_without_a_special_token_is_refused(tmp_path, tokenizer: ByteLevelTokenizer) -> None:
    description = tokenizer.encoder.to_str().replace('"<s>"', '"<other>"')
    (tmp_path / "tokenizer.json").write_text(description, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokeniser lacks <s>"):
        ByteLevelTokenizer.load(tmp_path)


def test_file_of_another_kind_of_tokens_is_refused(tmp_path, tokenizer: ByteLevelTokenizer) -> None:
    description = json.loads(tokenizer.encoder.to_str())
    vocab = description["model"]["vocab"]
    vocab["▁word"] = len(vocab)
    (tmp_path / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a byte-level tokeniser"):
        ByteLevelTokenizer.load(tmp_path)
