import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import sentencepiece

from dragoman.model.text.id_tables import ids_by_piece, same_ids, shifted_ids
from dragoman.model.text.piece_model import CONTROL, PieceModel, parsed, with_names_as_text
from dragoman.model.text.sentencepiece import NO_ID, SentencePieceTokenizer
from dragoman.model.text.tokenizer import TokenizerError
from tests.oracles.vocabularies import trained

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(unigram: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(unigram, same_ids(unigram), EOS)


def test_a_special_token_that_is_typed_is_text(unigram: bytes, tokenizer: SentencePieceTokenizer) -> None:
    for name in ("</s>", "<s>", "<unk>"):
        ids = tokenizer.encode(f"the {name} work")
        assert EOS not in ids and 1 not in ids and all(character in tokenizer.decode(ids) for character in name.strip("<>/"))
    size = len(PieceModel(unigram).pieces)  # every character of "<猫>" is unknown, so the library gives it as one unknown piece
    named = SentencePieceTokenizer(unigram, same_ids(unigram), EOS, {1: "<s>", size: "<猫>", size + 1: "猫"})
    assert size + 1 in named.encode("a 猫") and size not in named.encode("a <猫>") and 1 not in named.encode("<s>")
    assert named.decode([1, *named.encode("the work"), EOS]) == "<s> the work", "answers may show it"
    ids = same_ids(unigram)
    ids[1] = NO_ID  # which control pieces may have
    assert SentencePieceTokenizer(unigram, ids, EOS).decode([1, 5]) == tokenizer.decode([5])


def test_user_defined_names_become_text_and_other_symbols_stay() -> None:
    model = trained(model_type="unigram", user_defined_symbols=["<2de>", "[X]", ">>fra<<", "\n", "▁▁", "#"])
    hidden, names = with_names_as_text(model)
    assert list(names) == ["<2de>", "[X]", ">>fra<<"]
    before, after = (SentencePieceTokenizer(content, same_ids(content), EOS) for content in (model, hidden))
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    for name in names:
        token = library.piece_to_id(name)
        assert token in before.encode(f"the {name} work"), "this is what shall not be"
        assert token not in after.encode(f"the {name} work")
        assert (before.token_bytes(token), after.token_bytes(token)) == (name.encode(), b"")
    assert after.encode("the # work\n") == before.encode("the # work\n") and library.piece_to_id("#") in after.encode("#")
    assert with_names_as_text(hidden) == (hidden, [])
    everything, names = with_names_as_text(model, lambda _: True)
    assert len(names) == 6 and PieceModel(everything).types.count(CONTROL) == 8


def test_ids_are_those_of_the_table(unigram: bytes, tokenizer: SentencePieceTokenizer) -> None:
    text = "the work and 猫"
    plain = tokenizer.encode(text)
    shifted = SentencePieceTokenizer(unigram, shifted_ids(unigram, 1, {"<s>": 0, "</s>": 2, "<unk>": 3}), 2)
    assert shifted.encode(text) == [i + 1 if i else 3 for i in plain]
    assert shifted.encode_batch([text, ""]) == [shifted.encode(text), []]
    assert shifted.decode(shifted.encode(text)) == tokenizer.decode(plain)
    assert (shifted.vocab_size, tokenizer.vocab_size) == (len(PieceModel(unigram).pieces) + 1, len(PieceModel(unigram).pieces))
    assert [shifted.token_bytes(i) for i in (0, 1, 2, shifted.vocab_size, 10**9)] == [b""] * 5


def test_a_vocabulary_of_its_own_is_looked_up_by_piece(unigram: bytes) -> None:
    pieces = [piece for piece in PieceModel(unigram).pieces if piece not in ("<unk>", "<s>", "</s>")]
    dropped, kept = pieces[5], [*pieces[:5], *pieces[6:]]
    names = ["</s>", "<unk>", ">>fra<<", *reversed(kept), "猫犬", "▁Katze", "<pad>"]
    vocabulary = {name: i for i, name in enumerate(names)}
    ids, others = ids_by_piece(unigram, vocabulary, 1, ("<pad>", ">>fra<<"))
    tokenizer = SentencePieceTokenizer(unigram, ids, 0, others)
    library = sentencepiece.SentencePieceProcessor(model_proto=unigram)
    for text in ("the work and others", f"{dropped.replace('▁', ' ')} of the", "a 猫 work", "a 猫犬 work"):
        assert tokenizer.encode(text) == [vocabulary.get(piece, 1) for piece in library.encode(text, out_type=str)]
    assert vocabulary["猫犬"] in tokenizer.encode("a 猫犬 work") and 1 in tokenizer.encode("a 猫 work")
    assert tokenizer.decode([vocabulary["▁Katze"], vocabulary["猫犬"], 2, len(names) - 1, 0]) == "Katze猫犬"
    assert tokenizer.decode([1]) == " ⁇ " and tokenizer.vocab_size == len(names) - 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda ids: ids[:-1], "ids of .* pieces, but the model has"),
        (lambda ids: [*ids[:-1], -1], "the piece .* has no id"),
        (lambda ids: [*ids[:-1], 1 << 24], "id 16777216 is not in 0 to"),
        (lambda ids: [*ids[:-1], ids[5]], r"id 5 is that of .* and of another piece"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(unigram: bytes, change, complaint: str) -> None:
    with pytest.raises(TokenizerError, match=complaint):
        SentencePieceTokenizer(unigram, change(same_ids(unigram)), EOS)
    for others in ({5: "x"}, {-1: "x"}, {1 << 24: "x"}):
        with pytest.raises(TokenizerError):
            SentencePieceTokenizer(unigram, same_ids(unigram), EOS, others)
    with pytest.raises(TokenizerError, match="has no id"):
        SentencePieceTokenizer(unigram, same_ids(unigram), -1)


def test_a_damaged_model_is_refused_or_still_tokenises(unigram: bytes) -> None:
    choice, num_refused = random.Random(5), 0
    for content in (b"", b"\0" * 100, b"no model", b"\x0a\x03\x0a\x01", b"\xff" * 1000):
        for read in (lambda content: SentencePieceTokenizer(content, [0], 0), PieceModel):
            with pytest.raises(TokenizerError):
                read(content)
    for _ in range(60):
        damaged = bytearray(unigram)
        if choice.random() < 0.4:
            del damaged[choice.randrange(len(damaged)) :]
        for _ in range(choice.randint(0, 6)):
            damaged[choice.randrange(len(damaged) or 1) if choice.random() < 0.5 else choice.randrange(6000) % len(damaged)] = 255
        try:
            content = bytes(damaged)
            tokenizer = SentencePieceTokenizer(content, same_ids(content), EOS)
        except TokenizerError as error:
            assert str(error).isprintable() and len(str(error)) < 500
            num_refused += 1
        else:
            assert isinstance(tokenizer.decode(tokenizer.encode("the work \u2581 猫")), str)
    assert num_refused > 20


def test_pieces_that_are_no_text_and_texts_that_would_change_are_refused(unigram: bytes) -> None:
    at = unigram.index(b"<unk>")
    with pytest.raises(TokenizerError):
        PieceModel(unigram[:at] + b"\xff\xfe\xfd\xfc\xfb" + unigram[at + 5 :])
    for kind, piece, complaint in (
        (1, "x" * 2000, "a piece has more than 1024 characters"),
        (6, "<0xZZ>", "is not written as one"),
        (2, "x", "2 pieces stand for what is unknown"),
    ):
        proto = parsed(unigram)
        proto.pieces[9].piece, proto.pieces[9].type = piece, kind
        with pytest.raises(TokenizerError, match=complaint):
            PieceModel(proto.SerializeToString())
    proto = parsed(unigram)
    proto.denormalizer_spec.precompiled_charsmap = proto.normalizer_spec.precompiled_charsmap
    with pytest.raises(TokenizerError, match="denormalizer_spec changes texts"):
        PieceModel(proto.SerializeToString())


def test_threads_get_what_one_gets(tokenizer: SentencePieceTokenizer, odd_texts: list[str]) -> None:
    texts = [*odd_texts[:200], "the work and " * 3000]
    expected = tokenizer.encode_batch(texts)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda _: [*map(tokenizer.encode, texts)], range(4))] == [expected] * 4
