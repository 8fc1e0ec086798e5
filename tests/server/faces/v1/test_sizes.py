"""What an answer can weigh at most, against what answers do weigh."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.core.answer_size import AnswerShape, TokenSizes, check_answer, check_scores
from dragoman.server.core.answers import Answer, Generated, LogProbs, Timings, TokenLogProb
from dragoman.server.core.scoring import Alignment, PairScores
from dragoman.server.engine import messages
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.v1.conversion import to_score_response, write_response
from dragoman.server.faces.v1.sizes import ENVELOPE_BYTES, MessageLimit
from dragoman.v1.generation_pb2 import GenerateResponse

VOCABULARY = 330
TIMES = Timings(1e300, 1e300, 1e300, 1e300, 1e300)


def generated(tokenizer: ByteLevelTokenizer, answers: list[list[int]], num_top: int, has_log_probs: bool = True) -> Generated:
    """Make an answer of these tokens; the likeliest ones at each position are those with the longest texts."""
    longest = sorted(range(VOCABULARY), key=lambda i: (len(tokenizer.token_bytes(i)), i), reverse=True)[:num_top]
    prepared: Any = SimpleNamespace(request=SimpleNamespace(search=SimpleNamespace(forced_prefix=[], num_top_log_probs=num_top)))
    model: Any = SimpleNamespace(tokenizers=Tokenizers.shared(tokenizer), manifest=SimpleNamespace(eos_id=1))

    def answer(ids: list[int]) -> Answer:
        told = messages.Answer(ids, [-1.5] * len(ids), -2.5, "length", [longest] * len(ids), [[-3.5] * num_top] * len(ids))
        return Answer(tokenizer.decode(ids), ids, "length", -2.5, LogProbs(model, prepared, told) if has_log_probs else ())

    name = "n" * 128
    return Generated(name, name, name, [answer(ids) for ids in answers], True, 2**31, 2**31, TIMES, 2**64 - 1)


def written(answer: Generated) -> int:
    response = GenerateResponse()
    asyncio.run(write_response(answer, 2**31 - 1, response))
    return response.ByteSize()


def bound(tokenizer: ByteLevelTokenizer, num_answers: int, num_tokens: int, num_top: int, has_log_probs: bool = True) -> int:
    """Return the smallest limit that lets such a request through."""
    sizes, search = TokenSizes.measured(tokenizer), messages.SearchOptions(num_answers=num_answers, num_top_log_probs=num_top)
    with pytest.raises(InvalidRequest) as caught:
        check_answer(search, num_tokens, has_log_probs, sizes, VOCABULARY, MessageLimit(1))
    size = int(caught.value.message.partition("may take ")[2].partition(" bytes")[0])
    check_answer(search, num_tokens, has_log_probs, sizes, VOCABULARY, MessageLimit(size))
    with pytest.raises(InvalidRequest):
        check_answer(search, num_tokens, has_log_probs, sizes, VOCABULARY, MessageLimit(size - 1))
    return size


@pytest.mark.parametrize(("num_top", "has_log_probs"), [(0, False), (0, True), (1, True), (7, True), (20, True)])
def test_no_answer_weighs_more_than_was_reckoned(tokenizer: ByteLevelTokenizer, num_top: int, has_log_probs: bool) -> None:
    draw = random.Random(num_top)
    for num_answers, num_tokens in ((1, 1), (1, 40), (3, 17), (8, 48)):
        most = bound(tokenizer, num_answers, num_tokens, num_top, has_log_probs)
        heaviest = max(range(VOCABULARY), key=lambda i: len(tokenizer.token_bytes(i)))
        broken = [draw.choice(range(3, 259)) for _ in range(num_tokens)]  # bytes, most of which are no text by themselves
        for ids in ([heaviest] * num_tokens, broken, [VOCABULARY - 1] * num_tokens):
            assert written(generated(tokenizer, [ids] * num_answers, num_top, has_log_probs)) <= most


def test_what_was_reckoned_is_what_the_heaviest_answer_weighs(tokenizer: ByteLevelTokenizer) -> None:
    """So a request that is sure to fit is not refused; what is on top are names and times, and numbers of one byte."""
    heaviest = max(range(128, VOCABULARY), key=lambda i: len(tokenizer.token_bytes(i)))
    size = written(generated(tokenizer, [[heaviest] * 48] * 8, 20))
    assert size <= bound(tokenizer, 8, 48, 20) <= 1.05 * size + ENVELOPE_BYTES


def test_scores_weigh_no_more_than_was_reckoned(tokenizer: ByteLevelTokenizer) -> None:
    for num_source, num_target in ((1, 1), (64, 48), (200, 300)):
        source, target = [VOCABULARY - 1] * num_source, [VOCABULARY - 2] * num_target
        pair = messages.ScoreRequest(1, source, target, 0.0, is_aligned=True)
        pieces = [tokenizer.token_bytes(i) for i in source]
        told = [TokenLogProb(i, tokenizer.token_bytes(i), -1.5) for i in target]
        alignment = Alignment(np.ones((num_target, num_source), np.float32), pieces)
        links = " ".join(f"{num_source}-{i}" for i in range(num_target))
        scores = PairScores("r" * 128, "m" * 128, "v" * 128, -1.5, -1.5, told, num_source, alignment, links)
        size = asyncio.run(to_score_response(scores, 2**31 - 1)).ByteSize()
        check_scores(
            pair, Tokenizers.shared(tokenizer), VOCABULARY, MessageLimit(round(1.05 * size) + 2 * ENVELOPE_BYTES + 14 * num_target)
        )
        with pytest.raises(InvalidRequest, match=r"^return_alignment: the scores of .*; max_message_bytes of the server is"):
            check_scores(pair, Tokenizers.shared(tokenizer), VOCABULARY, MessageLimit(size - 1))


def test_so_many_different_tokens_are_never_longer_than_the_longest(tokenizer: ByteLevelTokenizer) -> None:
    lengths = sorted((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), reverse=True)
    sizes = TokenSizes.measured(tokenizer)
    for count in (0, 1, 20, 64, 100, tokenizer.vocab_size):
        assert sizes.longest_together(count) >= sum(lengths[:count])
    assert [sizes.longest_together(count) for count in range(21)] == [sum(lengths[:count]) for count in range(21)]


def test_numbers_take_what_the_wire_takes() -> None:
    for number in (0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21):
        shape = AnswerShape(1, 1, 0, number)
        exact = GenerateResponse(tokens=[number]).ByteSize() - 2
        assert MessageLimit(1).answer_bytes(shape) - MessageLimit(1).answer_bytes(AnswerShape(1, 1, 0, 0)) == 2 * (exact - 1)


def test_a_large_answer_is_written_in_slices(tokenizer: ByteLevelTokenizer) -> None:
    async def run() -> None:
        turns = 0

        async def neighbour() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(neighbour())
        await write_response(generated(tokenizer, [[300] * 48] * 64, 20), 2**31 - 1, GenerateResponse())
        assert turns >= 64 * 48 * 21 // 4096
        turns = 0
        alignment = Alignment(np.ones((1024, 1024), np.float32), [b""] * 1024)
        await to_score_response(PairScores("", "", "", 0.0, 0.0, [], 1, alignment, ""), 2**31 - 1)
        assert turns >= 8
        task.cancel()

    asyncio.run(run())
