import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder

from dragoman.model.text.byte_level import EOS, PAD, SPECIAL_TOKENS, START, ByteLevelTokenizer
from dragoman.model.text.pieces import byte_alphabet
from dragoman.model.text.tokenizer import TokenizerError
from tests.examples import num_examples

ROOT = Path(__file__).parents[3]
PIECES = ["</s>", "<s>", "<pad>", "▁", " ", "  ", "\0", "\n", "\r\n", "\t", "👩‍👩‍👧‍👦", "🏳️‍🌈", "e\u0301", "é", "\u0301", "\ufeff"]
PIECES += ["\u2028", "ﷺ", "the", " dog"]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=8).map("".join))
MANY = settings(max_examples=num_examples(500, of=10_000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
SOME = settings(MANY, max_examples=num_examples(300, of=1_000))


@MANY
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
@example(texts=["", " ", "</s>", " </s> <pad><s>▁▁ ", "\0", "e\u0301👩‍👩‍👧‍👦"])
def test_any_text_comes_back(tokenizer: ByteLevelTokenizer, reloaded: ByteLevelTokenizer, texts: list[str]) -> None:
    rows = [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in rows] == texts
    assert all({tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id}.isdisjoint(ids) for ids in rows)
    assert tokenizer.encode_batch(texts) == rows == [reloaded.encode(text) for text in texts]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = [0, *sorted(min(place, len(ids)) for place in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(places)]


@settings(MANY, max_examples=num_examples(600, of=3_000))
@given(data=st.data())
def test_pieces_of_any_ids_add_up(tokenizer: ByteLevelTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 20), max_size=5)))
    stream = tokenizer.detokenizer()
    streamed = "".join([stream.push(piece) for piece in pieces] + [stream.finish()])
    in_bytes = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace").removeprefix(" ")
    assert streamed == tokenizer.decode(ids) == in_bytes


@SOME
@given(text=TEXTS)
@example(text="👩‍👩‍👧‍👦 雪")
def test_each_piece_is_all_that_is_certain(tokenizer: ByteLevelTokenizer, text: str) -> None:
    """After each token the pieces so far are the longest whole-character prefix of the bytes so far."""
    stream, seen, shown = tokenizer.detokenizer(), b"", ""
    for token in tokenizer.encode(text):
        seen += tokenizer.token_bytes(token)
        shown += stream.push([token])
        assert shown == seen.decode("utf-8", "ignore").removeprefix(" ")
    assert (shown, stream.finish()) == (text, "")
    first_byte = tokenizer.encoder.token_to_id({byte: char for char, byte in byte_alphabet().items()}[0xF0])
    half = tokenizer.detokenizer()
    assert (half.push([first_byte]), half.finish()) == ("", "\ufffd")


def test_special_tokens_come_first_and_are_silent_and_every_byte_is_a_token(tokenizer: ByteLevelTokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id) == (0, 1, 2)
    assert [tokenizer.encoder.token_to_id(token) for token in (PAD, EOS, START)] == [0, 1, 2]
    ids = tokenizer.encode("the dog")
    noisy = [tokenizer.start_id, *ids[:1], tokenizer.pad_id, *ids[1:], tokenizer.eos_id, tokenizer.pad_id]
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 7]  # which only pad a model's vocabulary
    assert tokenizer.decode(noisy) == tokenizer.decode([*ids, *beyond]) == "the dog"
    assert sorted(byte_alphabet().values()) == list(range(256))
    singles = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles
    learnt = ByteLevelTokenizer.train([" ".join(SPECIAL_TOKENS * 3)] * 50, 400)
    assert learnt.eos_id not in learnt.encode("</s>"), "no token is learnt out of a special one"
    assert learnt.decode(learnt.encode("</s>")) == "</s>"


@pytest.fixture(scope="module")
def reloaded(tokenizer: ByteLevelTokenizer, tmp_path_factory: pytest.TempPathFactory) -> ByteLevelTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    return ByteLevelTokenizer.load(folder)


TRAINING = """
import hashlib
from dragoman.model.text.byte_level import ByteLevelTokenizer
from tests.model.text.test_byte_level import made_up
print(hashlib.sha256(ByteLevelTokenizer.train(made_up(7), 600).encoder.to_str().encode()).hexdigest())
"""


def test_training_twice_gives_the_same_vocabulary() -> None:
    """In processes of their own, where hash tables are seeded differently."""
    answers = {subprocess.check_output([sys.executable, "-c", TRAINING], cwd=ROOT, text=True) for _ in range(2)}
    assert len(answers) == 1


def made_up(seed: int) -> list[str]:
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
    for seed, size, complaint in (
        (2, 600, "learnt from other texts"),
        (1, 100_000, r"of these texts \d+ tokens can be learnt, not 100000"),
        (1, 300, "350 tokens already, 300 are fewer"),
    ):
        with pytest.raises(TokenizerError, match=complaint):
            small.extended(made_up(seed), size)


def test_a_missing_or_damaged_file_is_named(tmp_path, tokenizer: ByteLevelTokenizer) -> None:
    path, whole = tmp_path / "tokenizer.json", tokenizer.encoder.to_str()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        ByteLevelTokenizer.load(tmp_path)
    other = json.loads(whole)
    other["model"]["vocab"]["▁word"] = len(other["model"]["vocab"])
    hostile = ("[" * 100_000, "\ufeff{}", '{"model": "\\ud800"}', "{}\n{}", "null")
    for content in ("", "{}", "not json", '{"model": 1}', json.dumps(other), *hostile):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a byte-level tokeniser") as caught:
            ByteLevelTokenizer.load(tmp_path)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600
    path.write_text(whole.replace('"<s>"', '"<other>"'), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokeniser lacks <s>"):
        ByteLevelTokenizer.load(tmp_path)
    asked = Encoder.from_str(whole)
    asked.enable_truncation(2)
    asked.enable_padding(length=10_000_000)
    path.write_text(asked.to_str(), encoding="utf-8")
    assert ByteLevelTokenizer.load(tmp_path).encode("the dog runs") == tokenizer.encode("the dog runs"), "texts are never cut"
