import pytest

from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.tokenizer import TokenizerError


def test_bytes_come_after_the_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [100, 198, 172] and tokenizer.vocab_size == 384
    assert tokenizer.decode([0, 1, 2, *tokenizer.encode("aé</s>"), 259, 383, 384, 10**9]) == "aé</s>"
    assert [tokenizer.token_bytes(i) for i in (2, 3, 258, 259, 383, 384)] == [b"", b"\0", b"\xff", b"", b"", b""]
    assert tokenizer.encode_batch(["a", ""]) == [[100], []]


@pytest.mark.parametrize("numbers", [(3, 3, 125), (258, 3, 125), (384, 3, 125), (-1, 3, 125), (1, -1, 0), (1, 3, 1 << 20)])
def test_numbers_that_make_no_vocabulary_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(TokenizerError):
        ByteTokenizer(*numbers)
