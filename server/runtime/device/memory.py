"""Memory plan of a model on a device."""

from dataclasses import dataclass

from dragoman.export.cuda_contract import attentions
from dragoman.export.graph_file import GraphFile
from dragoman.server.runtime.device.buckets import Buckets
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.device.model import DeviceModel

SAYINGS = (
    "is smaller than requested bytes of",  # available memory of the arena, whose limit is reached
    "failed to allocate memory",  # the arena may grow, and the device has nothing left
    "out of memory",  # CUDA failure 2
    "cublas failure 3:",  # CUBLAS_STATUS_ALLOC_FAILED, which is now described and not named
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",  # until cuDNN 8; it now says which of the two it is
    "cudnn_status_internal_error_device_allocation_failed",
    "cudnn_status_internal_error_host_allocation_failed",
)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether ONNX Runtime ran out of device memory, so that less at once may do."""
    text = str(error).lower()
    return any(saying in text for saying in SAYINGS)


GIB = 2**30
DEFAULT_SHARE = 0.9
"""Of the memory that is free at the start, what is taken where no limit is set."""
MIN_ACTIVATION_BYTES = 2**27
"""Left to each of ONNX Runtime's sessions beyond its weights, at the least."""
LIBRARY_BYTES = 2**28
"""Kernels that are loaded when they are first used, and workspaces of cuBLAS, 32 MiB a session on compute capability 9."""
GRAPH_BYTES = 2**19
"""One captured step."""


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """What one of ONNX Runtime's sessions is expected to take.

    Attributes:
        weights: As they are stored, and the output projection widened.
        activations: An estimate of what a run computes with.
    """

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.activations


NO_SESSION = SessionMemory(0, 0)


@dataclass(frozen=True, slots=True)
class Budget:
    """One device's memory, divided; all of it bytes.

    Attributes:
        allowed: All that may be taken.
        encoder: The most that the encoder's session may take, weights included.
        decoder: The same of the decode step.
        scorer: The same of the scorer; 0 where there is none.
        left_free: What stays free for others.
    """

    allowed: int
    encoder: int
    decoder: int
    scorer: int
    left_free: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each part.

    Attributes:
        slot_bytes: One slot's caches; in a Transformer 2 · L · H · Dh · (T + S) · bytes of an element.
        caches: All slots'.
        scratch: For laying caches out anew, as large as one of them; nothing where there is one capacity only.
        staging: The encoder's outputs, until they lie in their slots.
        arrays: Inputs and outputs of a step.
        encoder: Its session.
        decoder: The decode step's.
        scorer: The scorer's; nothing where there is none.
        libraries: Of CUDA.
        graphs: Captured steps.
    """

    slot_bytes: int
    caches: int
    scratch: int
    staging: int
    arrays: int
    encoder: SessionMemory
    decoder: SessionMemory
    scorer: SessionMemory
    libraries: int
    graphs: int

    @classmethod
    def of(cls, model: DeviceModel, buckets: Buckets, prefill_tokens: int, num_graphs: int = 0) -> "MemoryPlan":
        """Reckon for a model.

        Args:
            model: Its dimensions.
            buckets: The last of each are what memory is reserved for.
            prefill_tokens: Positions of one run of the encoder at the most, padding included.
            num_graphs: Shapes that will be captured.
        """
        max_rows = buckets.rows[-1]
        kinds = (model.self_kv, buckets.targets), (model.cross_kv, buckets.sources)
        slot = sum(kind.num_tensors * kind.token_bytes * sizes[-1] for kind, sizes in kinds)
        moved = [kind.token_bytes * sizes[-1] for kind, sizes in kinds if len(sizes) > 1]
        return cls(
            slot_bytes=slot,
            caches=slot * max_rows,
            scratch=max(moved, default=0) * max_rows,
            staging=model.cross_kv.num_tensors * model.cross_kv.token_bytes * prefill_tokens,
            arrays=step_input_bytes(max_rows) + step_output_bytes(max_rows, buckets.candidates[-1]) + 16 * prefill_tokens,
            encoder=_encoder(model, prefill_tokens),
            decoder=_decoder(model, max_rows),
            scorer=_scorer(model) if model.scorer_path.is_file() else NO_SESSION,
            libraries=LIBRARY_BYTES,
            graphs=GRAPH_BYTES * num_graphs,
        )

    @property
    def reserved(self) -> int:
        """What the runner itself allocates, all of it at the start."""
        return self.caches + self.scratch + self.staging + self.arrays

    @property
    def arena(self) -> int:
        """What ONNX Runtime is expected to take, and what CUDA does beside it."""
        return self.encoder.total + self.decoder.total + self.scorer.total + self.libraries + self.graphs

    def budget(self, available: int, limit: int) -> Budget:
        """Divide what may be taken, having made sure that it is enough; what is over goes to the sessions by their activations.

        Args:
            available: What is free.
            limit: What the operator allows; 0 for `DEFAULT_SHARE` of what is free.

        Raises:
            DeviceError: If it does not fit, with what would.
        """
        allowed = min(limit, available) if limit else int(DEFAULT_SHARE * available)
        over = allowed - self.reserved - self.arena
        if over < 0:
            raise DeviceError(self._refusal(allowed, available))
        sessions = self.encoder, self.decoder, self.scorer
        estimated = sum(session.activations for session in sessions)
        encoder, decoder, scorer = (session.total + over * session.activations // estimated for session in sessions)
        return Budget(allowed, encoder, decoder, scorer, available - allowed)

    def parts(self, budget: Budget) -> dict[str, int]:
        """Return the plan as it is logged and measured: bytes of each part, by name; together they are all that was free."""
        parts = {name: getattr(self, name) for name in ("caches", "scratch", "staging", "arrays", "libraries", "graphs")}
        parts |= {"encoder": budget.encoder, "decoder": budget.decoder, "scorer": budget.scorer}
        return parts | {"left_free": budget.allowed + budget.left_free - sum(parts.values())}

    def _refusal(self, allowed: int, available: int) -> str:
        """Say what does not fit, and what would."""
        num_slots = self.caches // self.slot_bytes
        per_slot = self.slot_bytes + (self.scratch + self.arrays) // max(1, num_slots)
        fitting = max(0, (allowed - self.arena - self.staging) // per_slot)
        advice = f"at most {fitting} slots fit (--max-slots)" if fitting else "not even one slot fits"
        return (
            f"{num_slots} slots need {self.reserved / GIB:.2f} GiB of device memory and the model about "
            f"{self.arena / GIB:.2f} GiB, but {allowed / GIB:.2f} GiB may be used of {available / GIB:.2f} GiB free; {advice}"
        )


def _encoder(model: DeviceModel, prefill_tokens: int) -> SessionMemory:
    """Reckon the encoder: its layers' activations, and the present keys and values of one layer, which nobody reads."""
    graph = model.read_graph(model.encoder_path)
    presents = 2 * model.cross_kv.token_bytes * prefill_tokens
    scores = _scores(model, graph, prefill_tokens, model.max_source_tokens)
    activations = 16 * prefill_tokens * model.d_model * 4 + presents + scores
    return SessionMemory(graph.num_weight_bytes, max(MIN_ACTIVATION_BYTES, activations))


def _decoder(model: DeviceModel, max_rows: int) -> SessionMemory:
    """Reckon the decode step: logits, log-probabilities and the search for the likeliest."""
    graph = model.read_graph(model.decoder_path)
    scores = _scores(model, graph, max_rows, model.max_target_tokens)
    activations = 3 * 4 * max_rows * model.num_choices + scores
    weights = graph.num_weight_bytes + model.projection_bytes
    return SessionMemory(weights, max(MIN_ACTIVATION_BYTES, activations))


def _scorer(model: DeviceModel) -> SessionMemory:
    """Reckon one pair of the longest source and target: the encoder's and the decoder's parts, and attention that is kept."""
    graph = model.read_graph(model.scorer_path)
    sources, targets = model.max_source_tokens, model.max_target_tokens
    heads, layers = model.cross_kv.num_pieces, model.cross_kv.num_tensors // 2
    attention = 4 * targets * sources * (3 * heads + 2 * layers)
    presents = 2 * model.cross_kv.token_bytes * max(sources, targets)
    attention += _scores(model, graph, max(sources, targets), max(sources, targets))
    activations = 3 * 4 * targets * model.target_vocab_size + 16 * (sources + targets) * model.d_model * 4 + attention + presents
    weights = graph.num_weight_bytes + 4 * model.target_vocab_size * model.d_model * (model.element_bytes == 2)
    return SessionMemory(weights, max(MIN_ACTIVATION_BYTES, activations))


def _scores(model: DeviceModel, graph: GraphFile, num_queries: int, num_keys: int) -> int:
    """Reckon scores and the bias that is added to them, in a graph that has one: else they are not in memory."""
    if not any(attention.has("attention_bias") for attention in attentions(graph)):
        return 0
    return (4 + 2 * model.element_bytes) * model.cross_kv.num_pieces * num_queries * num_keys


def step_input_bytes(num_rows: int) -> int:
    """Return the size of a step's tokens, positions and source lengths."""
    return 3 * 8 * num_rows


def step_output_bytes(num_rows: int, num_candidates: int) -> int:
    """Return the size of a step's candidates: ids of 8 bytes, log-probabilities of 4."""
    return 12 * num_rows * num_candidates
