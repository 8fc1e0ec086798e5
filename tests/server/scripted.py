"""An engine that does as it is told, and models to name it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from dragoman.export.manifest import Origin
from dragoman.export.proof.report import Parity
from dragoman.model.generation import Defaults, Template
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine.messages import Answer, Finished, Request, Scored, ScoreRequest, Share, Tokens
from dragoman.server.errors import QueueFull, UnknownModel
from dragoman.server.models.model_file import Traits
from dragoman.server.models.registry import ServedVersion
from dragoman.server.models.use import Use
from dragoman.server.service.languages import PromptTemplates


class ScriptedEngine:
    """Answers every request with the same tokens, or ends it as it is told to; each further answer is a token shorter."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.reason: Any = "eos"
        self.incident = ""
        self.retry_after_seconds = self.needed_seconds = 0.0
        self.error: BaseException | None = None
        self.is_ready = self.has_places = True
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.arrived, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    def next_id(self) -> int:
        return len(self.requests) + 1

    def ensure_place(self, share: Share) -> None:
        if not self.has_places:
            raise QueueFull("too many requests are waiting", self.retry_after_seconds)

    def hold(self) -> None:
        """Let requests wait until `gate` is set."""
        self.gate.clear()

    async def generate(self, request: Request) -> Finished:
        self.requests.append(request)
        self.arrived.set()
        await self._pass_gate(request.id)
        return self._finished(request)

    async def _pass_gate(self, request_id: int) -> None:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        if self.error is not None:
            raise self.error

    async def stream(self, request: Request) -> AsyncIterator[Tokens | Finished]:
        self.requests.append(request)
        self.arrived.set()
        is_complete = False
        try:
            for token in (*request.search.forced_prefix, *self.answer):
                yield Tokens(request.id, [token])
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            is_complete = True
            if self.reason != "silence":
                yield self._finished(request)
        finally:
            if not is_complete:
                self.cancelled.append(request.id)

    async def score(self, pair: ScoreRequest) -> Scored:
        """Score target token i with -i/2; weights of the alignment count from 0."""
        self.arrived.set()
        await self._pass_gate(pair.id)
        ended, rest = pair.arrival + 1.0, (self.incident, self.retry_after_seconds)
        if self.reason != "eos":
            return Scored(pair.id, self.reason, [], b"", ended, *rest)
        num_source, num_target = len(pair.source_ids), len(pair.target_ids)
        alignment = np.arange(num_source * num_target, dtype=np.float32).tobytes() if pair.is_aligned else b""
        return Scored(pair.id, "eos", [-0.5 * i for i in range(num_target)], alignment, ended, *rest)

    def _finished(self, request: Request) -> Finished:
        answered = self.reason in ("eos", "length")
        answers = [self._answer(request, i) for i in range(request.search.num_answers)] if answered else []
        return Finished(
            id=request.id,
            reason=self.reason,
            answers=answers,
            num_generated=sum(len(answer.log_probs) for answer in answers),
            admitted=request.arrival + 0.25 if answered else None,
            prefill_seconds=0.125,
            first_token=request.arrival + 0.5 if answered else None,
            ended=request.arrival + 1.0,
            incident=self.incident,
            retry_after_seconds=self.retry_after_seconds,
            needed_seconds=self.needed_seconds,
        )

    def _answer(self, request: Request, index: int) -> Answer:
        tokens = self.answer[: len(self.answer) - index]
        positions = range(len(tokens) + (self.reason == "eos"))
        num_top = request.search.num_top_log_probs
        return Answer(
            token_ids=[*request.search.forced_prefix, *tokens],
            log_probs=[-0.5 * i for i in positions],
            score=-1.0 - index,
            reason=self.reason,
            top_ids=[[10 + k for k in range(num_top)] for _ in positions] if num_top else [],
            top_log_probs=[[-0.25 * k for k in range(num_top)] for _ in positions] if num_top else [],
        )


class LoadedModels:
    def __init__(self, *models: Any) -> None:
        self.by_name = {model.name: model for model in models}

    def get(self, name: str, version: str = "") -> Any:
        if not name and len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            raise UnknownModel(name, list(self.by_name))
        return self.by_name[name]

    @asynccontextmanager
    async def hold(
        self, name: str, version: str = "", request_id: str = "", caller: str = "", seconds: float | None = None
    ) -> AsyncIterator[Any]:
        yield self.get(name, version)

    def served(self, name: str) -> list[ServedVersion]:
        return [ServedVersion(name, self.get(name).version)]

    def all(self) -> list[Any]:
        return [self.by_name[name] for name in sorted(self.by_name)]


def scripted_model(tokenizer: ByteLevelTokenizer, name: str = "en-de", **fields: Any) -> Any:
    """Return a model with such an engine; fields of its manifest may be others."""
    manifest = {
        "max_source_tokens": 64,
        "max_target_tokens": 48,
        "num_decoder_layers": 4,
        "default_max_new_tokens": 32,
        "eos_id": tokenizer.eos_id,
        "precision": "fp32",
        "weight_bits": 8,
        "cache_precision": "fp32",
        "domain": "",
        "one_sentence": False,
        "source_vocab_size": tokenizer.vocab_size,
        "target_vocab_size": tokenizer.vocab_size,
        "num_choices": tokenizer.vocab_size,
        "template": Template(),
        "languages": None,
        "defaults": Defaults(),
        "architecture": "transformer",
        "has_prompts": False,
        "attention_layers": 4,
        "parity": Parity(0.001, 0.0002, 10, 100, 5, 0, 5, 0.0003, 0.0001),
        "origin": Origin("ab" * 32, "2.0", "1.0"),
        "decoder_start_id": tokenizer.start_id,
    }
    described: Any = SimpleNamespace(name=name, **manifest | fields)
    return SimpleNamespace(
        name=name,
        version="v7",
        label="7",
        is_asleep=False,
        card=str,
        num_engines=3,
        num_threads=1,
        num_lone_threads=4,
        manifest=described,
        templates=PromptTemplates(described),
        tokenizers=Tokenizers.shared(tokenizer),
        engine=ScriptedEngine(tokenizer.encode("Fußball 🐕 日本")),
        device="cpu",
        use=Use(),
        max_slots=8,
        max_slots_per_request=8,
        traits=Traits(),
    )
