"""Texts that are divided: in order, with what is kept in its place; failures, limits and cancellation of the whole."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from dragoman.model.generation import Defaults
from dragoman.server.errors import InvalidRequest, QueueFull, ServiceError, StepFailed
from dragoman.server.protocols.v1.messages import MessageLimit
from dragoman.server.service.answers import Answer, Generated, Timings, TokenLogProb
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.in_flight import InFlight
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.texts import Texts, is_divided
from dragoman.server.telemetry.metrics import Metrics

ONE = Timings(1.0, 2.0, 3.0, 4.0, 5.0)
REQUEST = GenerateRequest(split="sentences")
WINDOW = 4


class Engine:
    """An engine that answers in capital letters, n times the text for answer n, in the order of the texts' lengths."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.num_running = self.most_running = self.num_refusals = 0
        self.fail: Callable[[str], ServiceError | None] = lambda text: None

    def ensure_place(self, share: object) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise QueueFull("too many requests are waiting", 1.0)

    async def serve(self, request: GenerateRequest, call: Call, model: Any, limit: Any) -> Generated:
        self.asked.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for _ in request.text:
                await asyncio.sleep(0)
            if (error := self.fail(request.text)) is not None:
                raise error
        finally:
            self.num_running -= 1
        call.source_tokens, call.generated_tokens = len(request.text), 1
        text = request.forced_prefix + request.text.upper()
        told = [TokenLogProb(len(text), text.encode(), -1.0)]
        count = (request.num_return_sequences or 1) - ("few" in text.lower())
        answers = [
            Answer(text * ("same" in text.lower() or rank), [len(text)], "length" if "long" in request.text else "eos", -rank, told)
            for rank in range(1, count + 1)
        ]
        return Generated("id", "m", "v", answers, False, call.source_tokens, 1, ONE, request.seed)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def model(engine: Engine) -> Any:
    manifest = SimpleNamespace(defaults=Defaults(), has_prompts=False, num_choices=9, target_vocab_size=9)
    traits = SimpleNamespace(split="", glossary="")
    return SimpleNamespace(name="m", version="v", engine=engine, manifest=manifest, traits=traits, max_slots=2)


@pytest.fixture
def texts(engine: Engine) -> Texts:
    async def cut_source(text: str, *_: object) -> list[str]:
        return [text[:10], text[10:]] if len(text) > 20 else [text]

    async def validate(request: GenerateRequest, *_: object) -> None:
        if request.priority:
            raise InvalidRequest("priority", "is invalid")

    validator: Any = SimpleNamespace(cut_source=cut_source, validate=validate)
    return Texts(RunningCalls(Metrics(CollectorRegistry())), InFlight(lambda: WINDOW), validator, engine.serve, 1000)


async def generate(texts: Texts, model: Any, *sources: str, limit: Any = None, **options: Any) -> list[Generated]:
    requests = [replace(REQUEST, text=text, **options) for text in sources]
    return await texts.generate(requests, Call.begin("/m"), model, limit)


async def test_what_is_no_sentence_stays_in_its_place(texts: Texts, model: Any) -> None:
    source = "\t- One here. Two.\r\n\r\n ...\nThree"
    (found,) = await generate(texts, model, source)
    assert found.best.text == "\t- ONE HERE. TWO.\r\n\r\n ...\nTHREE" == source.upper()
    spans = [(one.source_start, one.source_end) for one in found.segments]
    assert [source[start:end] for start, end in spans] == ["One here.", "Two.", "Three"]
    assert [(one.target_start, one.target_end) for one in found.segments] == spans
    assert (found.source_tokens, found.generated_tokens, found.best.tokens, found.best.score) == (18, 3, [9, 4, 5], -1.0)
    assert [told.piece for told in found.best.log_probs] == [b"ONE HERE.", b"TWO.", b"THREE"] and len(found.best.log_probs) == 3
    assert (found.timings.queue_seconds, found.timings.decode_seconds, found.timings.time_to_first_token_seconds) == (3.0, 9.0, 4.0)


async def test_streamed_segments_come_in_order_and_make_the_same_answer(texts: Texts, model: Any) -> None:
    source = "A rather slow one. Quick.\n\nNext one. "
    pieces = [piece async for piece in texts.stream(replace(REQUEST, text=source), Call.begin("/m"), model, None)]
    assert [piece.text for piece in pieces] == ["A RATHER SLOW ONE.", " QUICK.", "\n\nNEXT ONE.", " "]
    (whole,) = await generate(texts, model, source)
    result = pieces[-1].result
    assert result is not None and [token for piece in pieces for token in piece.tokens] == whole.best.tokens
    assert (result.answers[0].text, result.segments) == (whole.best.text, whole.segments)


async def test_texts_of_a_call_share_its_segments(texts: Texts, model: Any, engine: Engine) -> None:
    sources = ["One. Two.", "", " \n", "Three. Few. Few too.", "..."]
    found = await generate(texts, model, *sources, num_return_sequences=2, forced_prefix="x", num_beams=2)
    assert [one.best.text for one in found] == ["xONE. TWO.", "", " \n", "xTHREE. FEW. FEW TOO.", "..."]
    assert [one.answers[1].text for one in found if len(one.answers) > 1] == [
        "xONE.xONE. TWO.TWO.",
        "",
        " \n",
        "xTHREE.xTHREE. FEW. FEW TOO.",
        "...",
    ]
    assert engine.most_running <= 2, "a beam takes two slots"


async def test_one_sentence_is_the_calls_own_request(texts: Texts, model: Any, engine: Engine) -> None:
    call = Call.begin("/m")
    (found,) = await texts.generate([replace(REQUEST, text=" One. ")], call, model, None)
    assert found.best.text == " ONE. " and call.is_counted and call.source_tokens == 4 and len(engine.asked) == 1


async def test_a_sentence_that_is_too_long_is_marked_where_it_is_cut(texts: Texts, model: Any) -> None:
    source = "It is much too long for it. It is long."
    (found,) = await generate(texts, model, source)
    assert found.best.text == source.upper() and found.best.finish_reason == "length"
    cut = [(source[one.source_start : one.source_end], one.is_cut) for one in found.segments]
    assert cut == [("It is much", True), ("too long for it.", False), ("It is long.", False)]


async def test_a_window_bounds_the_segments_under_way(texts: Texts, model: Any, engine: Engine) -> None:
    (found,) = await generate(texts, model, "Ah. Be. Cee. " * 9)
    assert len(found.segments) == 27 and engine.most_running == WINDOW


async def test_samples_of_all_segments_have_one_seed(texts: Texts, model: Any, engine: Engine) -> None:
    (drawn,) = await generate(texts, model, "One. Two.", do_sample=True)
    assert {request.seed for request in engine.asked} == {drawn.seed} != {None}
    (given,) = await generate(texts, model, "One. Two.", do_sample=True, seed=7)
    (plain,) = await generate(texts, model, "One. Two.")
    assert (given.seed, plain.seed) == (7, None)


async def test_a_text_that_was_accepted_waits_for_the_queue(texts: Texts, model: Any, engine: Engine) -> None:
    engine.num_refusals = 5
    (found,) = await generate(texts, model, "One. Two. Three.")
    assert found.best.text == "ONE. TWO. THREE." and engine.num_refusals == 0


async def test_a_segment_that_is_turned_away_waits_unless_it_is_the_first(texts: Texts, model: Any, engine: Engine) -> None:
    refused = list[str]()

    def fail(text: str) -> ServiceError | None:
        refused.append(text)
        return QueueFull("too many requests are waiting") if text != "One." and refused.count(text) < 3 else None

    engine.fail = fail
    call = Call.begin("/m")
    (found,) = await texts.generate([replace(REQUEST, text="One. Two. Three.")], call, model, None)
    assert found.best.text == "ONE. TWO. THREE." and refused.count("Two.") == 3 and call.source_tokens == 14
    engine.fail = lambda text: QueueFull("too many requests are waiting") if text == "One." else None
    with pytest.raises(QueueFull, match=r"characters 0 to 4"):
        await generate(texts, model, "One. Two.")


async def test_a_text_without_segments_is_checked_too(texts: Texts, model: Any, engine: Engine) -> None:
    (found,) = await generate(texts, model, "...", num_return_sequences=3)
    assert [answer.text for answer in found.answers] == ["..."] * 3 and not engine.asked
    with pytest.raises(InvalidRequest, match="priority"):
        await generate(texts, model, "...", priority=99)


async def test_a_segment_that_fails_ends_all_and_is_named(texts: Texts, model: Any, engine: Engine) -> None:
    engine.fail = lambda text: StepFailed("generation failed") if text == "Two." else None
    with pytest.raises(StepFailed, match=r"generation failed \(characters 5 to 9\)"):
        await generate(texts, model, "One. Two. A much longer one.")
    with pytest.raises(StepFailed, match=r"characters 0 to 4 of text 2"):
        await generate(texts, model, "One. A much longer one.", "Two.")
    assert engine.num_running == 0


async def test_a_caller_that_leaves_cancels_all_segments(texts: Texts, model: Any, engine: Engine) -> None:
    task = asyncio.create_task(generate(texts, model, "A much longer one. " * 9))
    while not engine.num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_running == 0 and len(engine.asked) < 9
    stream = texts.stream(replace(REQUEST, text="One. A much longer one."), Call.begin("/m"), model, None)
    assert (await anext(stream)).text == "ONE."
    await stream.aclose()
    assert engine.num_running == 0


async def test_answers_that_cannot_be_sent_end_the_call_early(texts: Texts, model: Any, engine: Engine) -> None:
    limit = MessageLimit(30)
    with pytest.raises(InvalidRequest, match="more than 30 bytes, max_message_bytes"):
        await generate(texts, model, "One two three. " * 50, limit=limit)
    assert len(engine.asked) <= 3 + WINDOW
    engine.asked.clear()
    with pytest.raises(InvalidRequest, match="more than 30 bytes"):
        await generate(texts, model, "One.\n" + "-\n" * 6, num_return_sequences=3, limit=limit)
    with pytest.raises(InvalidRequest, match="text: more than 1000 characters, max_text_characters"):
        await generate(texts, model, "a" * 600, "b" * 401)
    assert not engine.asked


def test_division_is_asked_for_by_the_request_or_the_models_file(model: Any) -> None:
    def asked(split: str) -> bool:
        return is_divided(GenerateRequest(split=split), model)

    assert [asked(split) for split in ("", "none", "lines")] == [False, False, True]
    model.traits.split = "sentences"
    assert [asked(split) for split in ("", "none", "lines")] == [True, False, True]
    with pytest.raises(InvalidRequest, match="split: 'words' is not one of none, sentences, lines"):
        asked("words")
    model.manifest.has_prompts = True
    with pytest.raises(InvalidRequest, match="split: model m continues prompts"):
        asked("lines")
    assert not asked(""), "a default for texts is none for prompts"


async def test_equal_answers_are_put_into_a_document_once(texts: Texts, model: Any) -> None:
    (found,) = await generate(texts, model, "<p>The <b>same</b></p>", markup="html", num_return_sequences=3, num_beams=3)
    first, second, third = (answer.text for answer in found.answers)
    assert first == "<p>THE <b>SAME</b></p>" and first is second is third
