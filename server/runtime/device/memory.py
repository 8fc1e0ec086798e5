"""Memory plan of a model on a device."""

from dataclasses import dataclass

from dragoman.export.cuda_contract import attentions
from dragoman.export.graph_file import GraphFile
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.device.model import Buckets, DeviceModel

SAYINGS = (
    "is smaller than requested bytes of",  # the arena's limit is reached
    "failed to allocate memory",  # the arena may grow, but the device is full
    "out of memory",  # CUDA failure 2
    "cublas failure 3:",  # CUBLAS_STATUS_ALLOC_FAILED, by number in recent versions
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",  # until cuDNN 8; later versions use the next two
    "cudnn_status_internal_error_device_allocation_failed",
    "cudnn_status_internal_error_host_allocation_failed",
)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether ONNX Runtime ran out of device memory, so that a smaller batch may fit."""
    text = str(error).lower()
    return any(saying in text for saying in SAYINGS)


GIB = 2**30
# Fraction of free memory used without a limit.
DEFAULT_SHARE = 0.9
# Minimum for each session beyond its weights.
MIN_ACTIVATION_BYTES = 2**27
# Kernels loaded at first use, and cuBLAS workspaces, 32 MiB per session on compute capability 9.
LIBRARY_BYTES = 2**28
# One captured step.
GRAPH_BYTES = 2**19


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """Expected bytes of an ONNX Runtime session: weights, with the output projection widened, and activations."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations


NO_SESSION = SessionMemory(0, 0)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits in bytes: of all memory, of each session with its weights, and the rest left free."""

    allowed: int
    encoder: int
    decoder: int
    scorer: int
    left_free: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each part; `slot_bytes` for a Transformer are 2 · L · H · Dh · (T + S) · bytes of an element.

    `scratch` is for moving caches (0 with one capacity), `staging` for encoder outputs, `arrays` for inputs and outputs of a step.
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
        """Plan the memory for the largest buckets, `prefill_tokens` padded positions of an encoder run and `num_graphs` graphs."""
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
        """Bytes that the runner allocates at the start."""
        return self.caches + self.scratch + self.staging + self.arrays

    @property
    def arena(self) -> int:
        """Bytes expected for ONNX Runtime and CUDA."""
        return self.encoder.total + self.decoder.total + self.scorer.total + self.libraries + self.graphs

    def budget(self, available: int, limit: int) -> Budget:
        """Divide the usable memory; the excess goes to the sessions in proportion to their activations.

        A limit of 0 is `DEFAULT_SHARE` of the free bytes. Raises `DeviceError`, naming the slots that fit, if the plan does not.
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
        """Return the bytes of each part by name, for log and metrics; they add up to all free memory."""
        parts = {name: getattr(self, name) for name in ("caches", "scratch", "staging", "arrays", "libraries", "graphs")}
        parts |= {"encoder": budget.encoder, "decoder": budget.decoder, "scorer": budget.scorer}
        return parts | {"left_free": budget.allowed + budget.left_free - sum(parts.values())}

    def _refusal(self, allowed: int, available: int) -> str:
        num_slots = self.caches // self.slot_bytes
        per_slot = self.slot_bytes + (self.scratch + self.arrays) // max(1, num_slots)
        fitting = max(0, (allowed - self.arena - self.staging) // per_slot)
        advice = f"at most {fitting} slots fit (--max-slots)" if fitting else "not even one slot fits"
        return (
            f"{num_slots} slots need {self.reserved / GIB:.2f} GiB of device memory and the model about "
            f"{self.arena / GIB:.2f} GiB, but {allowed / GIB:.2f} GiB may be used of {available / GIB:.2f} GiB free; {advice}"
        )


def _encoder(model: DeviceModel, prefill_tokens: int) -> SessionMemory:
    """Estimate the encoder: activations, and the unused present keys and values of one layer."""
    graph = model.read_graph(model.encoder_path)
    presents = 2 * model.cross_kv.token_bytes * prefill_tokens
    scores = _scores(model, graph, prefill_tokens, model.max_source_tokens)
    activations = 16 * prefill_tokens * model.d_model * 4 + presents + scores
    return SessionMemory(graph.num_weight_bytes, max(MIN_ACTIVATION_BYTES, activations))


def _decoder(model: DeviceModel, max_rows: int) -> SessionMemory:
    """Estimate the decode step: logits, log-probabilities and top-k."""
    graph = model.read_graph(model.decoder_path)
    scores = _scores(model, graph, max_rows, model.max_target_tokens)
    activations = 3 * 4 * max_rows * model.num_choices + scores
    weights = graph.num_weight_bytes + model.projection_bytes
    return SessionMemory(weights, max(MIN_ACTIVATION_BYTES, activations))


def _scorer(model: DeviceModel) -> SessionMemory:
    """Estimate one pair of the longest source and target: encoder, decoder and the returned attention."""
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
    """Estimate attention scores and their bias, stored only in graphs with a bias."""
    if not any(attention.has("attention_bias") for attention in attentions(graph)):
        return 0
    return (4 + 2 * model.element_bytes) * model.cross_kv.num_pieces * num_queries * num_keys


def step_input_bytes(num_rows: int) -> int:
    """Return the size of a step's tokens, positions and source lengths."""
    return 3 * 8 * num_rows


def step_output_bytes(num_rows: int, num_candidates: int) -> int:
    """Return the size of a step's candidates: ids of 8 bytes, log-probabilities of 4."""
    return 12 * num_rows * num_candidates
