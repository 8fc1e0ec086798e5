"""Training: one run from a configuration and parallel text to a checkpoint, resumable at any step with the same result.

The output directory is itself a checkpoint from the first validation on. What only training needs lies in its `training/` folder:
the resumable state, the newest validated weights, the two CSV logs and their picture.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from dragoman.model.checkpoint import Checkpoint, average_weights, save_tensors
from dragoman.model.config import ModelConfigError
from dragoman.model.corpus import DataError, read_parallel
from dragoman.model.data import Batch, bucket, collate
from dragoman.model.errors import InputError
from dragoman.model.evaluate import evaluate
from dragoman.model.files import write_text
from dragoman.model.growth import grown
from dragoman.model.loss import projected_cross_entropy, r_drop_cross_entropy
from dragoman.model.sampler import PairSampler
from dragoman.model.tokenizer import Tokenizer
from dragoman.model.training_config import TrainingConfig, TrainingConfigError, model_config
from dragoman.model.training_log import STEP_FIELDS, STEPS_FILE, VALIDATION_FIELDS, VALIDATION_FILE, CsvLog, plot_curves
from dragoman.model.transformer import Transformer

STATE_FILE = "state.safetensors"
SUMMARY_FILE = "summary.json"
SAVE_SECONDS = 60.0


@dataclass(slots=True)
class Progression:
    """Where a run is; with the tensors beside it in the state file, all that a resumed run needs."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best_bleu: float = -1.0
    validations_since_best: int = 0
    validated_step: int = 0
    seconds: float = 0.0


class Trainer:
    """One training run."""

    def __init__(
        self, config: TrainingConfig, data_dir: Path, output: Path, device: torch.device, save_seconds: float = SAVE_SECONDS
    ) -> None:
        """Read the text, learn or reload the vocabulary, and build the model, or take up a run that was stopped in `output`.

        Args:
            config: What to do.
            data_dir: Where the files that the configuration names lie.
            output: Where the checkpoint goes; made if absent.
            device: Where to compute.
            save_seconds: Time between two saved states, which is what a kill can cost.

        Raises:
            DataError: If the text cannot be used.
            TrainingConfigError: If the configuration does not fit the text, or is not the one `output` was started with.
        """
        self.config, self.schedule = config, config.training
        self.output, self.device, self.save_seconds = output, device, save_seconds
        self.folder = output / "training"
        data = config.data
        sources, targets = read_parallel(data_dir / data.source, data_dir / data.target)
        self.validation = read_parallel(data_dir / data.validation_source, data_dir / data.validation_target)
        initial = Checkpoint.load(Path(config.initial_checkpoint)) if config.initial_checkpoint else None
        tokenizer = initial.tokenizer if initial else Tokenizer.train(sources + targets, config.tokenizer.vocab_size)
        self.model_config = model_config(config, tokenizer)
        torch.manual_seed(self.schedule.seed)
        try:
            model = grown(initial.model, self.model_config) if initial else Transformer(self.model_config)
        except ModelConfigError as error:
            raise TrainingConfigError(f"initial_checkpoint: {error}") from error
        limits = self.model_config.max_source_positions, self.model_config.max_target_positions
        for name, lines, limit in zip((data.validation_source, data.validation_target), self.validation, limits, strict=True):
            _refuse_long_lines(data_dir / name, tokenizer.encode_batch(lines), limit)
        max_lengths = min(self.schedule.max_length, limits[0]), min(self.schedule.max_length, limits[1])
        try:
            self.sampler = PairSampler(tokenizer, (sources, targets), max_lengths, config.tokenizer.bpe_dropout, self.schedule.seed)
        except InputError as error:
            raise TrainingConfigError(f"training.max_length: {error}") from error
        model.to(device)
        self.checkpoint = Checkpoint(config.name, model, tokenizer)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            betas=(self.schedule.adam_beta1, self.schedule.adam_beta2),
            eps=1e-9,
            weight_decay=self.schedule.weight_decay,
            fused=True,
        )
        self._refuse_other_configuration()
        self.progression = Progression()
        if (self.folder / STATE_FILE).exists():
            self._load_state()
        self.steps_log = CsvLog(self.folder / STEPS_FILE, STEP_FIELDS, self.progression.step)
        self.validation_log = CsvLog(self.folder / VALIDATION_FILE, VALIDATION_FIELDS, self.progression.validated_step)

    def run(self, progress: Progress | None = None) -> None:
        """Train to `max_steps` or until patience runs out, then average, pick the better model and draw the curves."""
        try:
            self._train(progress or progress_bar())
            self.save_state()
            self._finish()
        finally:
            self.close()

    def _train(self, progress: Progress) -> None:
        """Do the remaining steps, logging each and saving the state now and then."""
        task = progress.add_task(self.config.name, total=self.schedule.max_steps, completed=self.progression.step, detail="")
        started = time.monotonic() - self.progression.seconds
        saved = time.monotonic()
        with progress:
            for batch in self._remaining_batches():
                before = time.monotonic()
                loss, norm = self._step(batch)
                now = time.monotonic()
                state = self.progression
                state.seconds = now - started
                rate = batch.num_target_tokens / (now - before)
                self.steps_log.write(
                    state.step, state.epoch, loss, self._rate(), norm, batch.num_target_tokens, round(now - before, 4)
                )
                best = f"  BLEU {state.best_bleu:.2f}" if state.best_bleu >= 0 else ""
                progress.update(task, completed=state.step, detail=f"loss {loss:.3f}  {rate:,.0f} tokens/s{best}")
                if now - saved >= self.save_seconds:
                    self.save_state()
                    saved = now

    def close(self) -> None:
        """Close the logs; `run` does so at its end."""
        self.steps_log.close()
        self.validation_log.close()

    def _remaining_batches(self) -> Iterator[Batch]:
        """Yield batches from where the run is, and validate between epochs; the order depends on seed and epoch alone."""
        state, schedule = self.progression, self.schedule
        while state.step < schedule.max_steps and not self._is_out_of_patience():
            rng = np.random.default_rng([schedule.seed, state.epoch])
            sources, targets = self.sampler.sample(rng)
            batches = bucket(sources, targets, schedule.max_tokens, rng)
            for indices in batches[state.batch :]:
                if state.step == schedule.max_steps:
                    break
                state.batch += 1
                state.step += 1
                yield collate([sources[i] for i in indices], [targets[i] for i in indices], self.model_config).to(self.device)
            if state.batch == len(batches):
                state.epoch += 1
                state.batch = 0
                if state.epoch % schedule.validate_every == 0:
                    self._validate()
                    self.save_state()

    def _step(self, batch: Batch) -> tuple[float, float]:
        """Do one optimiser step; return the loss a target token in nats and the gradient's norm before clipping."""
        model = self.checkpoint.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        loss = self._training_loss(batch) / batch.num_target_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_grad_norm_(model.parameters(), self.schedule.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise FloatingPointError(
                f"{self.config.name}: the gradient is not finite at step {self.progression.step}; lower learning_rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), float(norm)

    def _training_loss(self, batch: Batch) -> Tensor:
        """Return the summed loss of a batch, of two passes over it where R-Drop is wanted."""
        decoder, pad_id, smoothing = self.checkpoint.model.decoder, self.model_config.pad_id, self.schedule.label_smoothing
        if not self.schedule.r_drop:
            return self._cross_entropy(batch, smoothing)
        hidden = torch.stack(self._hidden(batch.repeated(2)).chunk(2))
        return r_drop_cross_entropy(
            hidden, decoder.output_weight, decoder.output_bias, batch.labels, pad_id, smoothing, self.schedule.r_drop
        )

    def _cross_entropy(self, batch: Batch, smoothing: float) -> Tensor:
        """Return the summed cross-entropy of a batch."""
        decoder, hidden = self.checkpoint.model.decoder, self._hidden(batch)
        return projected_cross_entropy(
            hidden, decoder.output_weight, decoder.output_bias, batch.labels, self.model_config.pad_id, smoothing
        )

    def _hidden(self, batch: Batch) -> Tensor:
        """Return what the vocabulary projection is applied to: `[B, T, d_model]`."""
        model = self.checkpoint.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.schedule.is_bf16):
            return model.decode(batch.target_ids, *model.encode(batch.source_ids, batch.source_lengths))

    def _validate(self) -> None:
        """Score the validation text, log it, keep the weights, and publish them as the checkpoint when they are the best so far."""
        state, model = self.progression, self.checkpoint.model
        loss = self._validation_loss()
        bleu, chrf = self._validation_scores(model)
        self.validation_log.write(state.step, state.epoch, loss, bleu, chrf)
        weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        save_tensors(self._weights_file(), weights)
        for old in self._validated()[: -self.schedule.average_last]:
            old.unlink()
        state.validated_step = state.step
        state.validations_since_best += 1
        if bleu > state.best_bleu:
            state.best_bleu, state.validations_since_best = bleu, 0
            self.checkpoint.save(self.output)
        plot_curves(self.folder)

    def _finish(self) -> None:
        """Average the newest validated weights and publish them if they beat the best single checkpoint."""
        if self.progression.validated_step < self.progression.step:
            self._validate()
            self.save_state()
        model = Transformer(self.model_config).to(self.device)
        averaged = average_weights(self._validated())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(averaged[name])
        bleu, chrf = self._validation_scores(model.eval())
        if bleu >= self.progression.best_bleu:
            Checkpoint(self.config.name, model, self.checkpoint.tokenizer).save(self.output)
        summary = asdict(self.progression) | {
            "num_pairs": self.sampler.num_pairs,
            "num_pairs_left_out": self.sampler.num_left_out,
            "averaged_checkpoints": len(self._validated()),
            "averaged_bleu": bleu,
            "averaged_chrf": chrf,
            "published": "averaged" if bleu >= self.progression.best_bleu else "best",
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "device": str(self.device),
            "num_threads": torch.get_num_threads(),
        }
        write_text(self.folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")

    @torch.inference_mode()
    def _validation_loss(self) -> float:
        """Return the validation text's cross-entropy a token, in nats, without smoothing."""
        self.checkpoint.model.eval()
        sources, targets = map(self.checkpoint.tokenizer.encode_batch, self.validation)
        total, tokens = 0.0, 0
        for indices in bucket(sources, targets, self.schedule.max_tokens, np.random.default_rng(0)):
            batch = collate([sources[i] for i in indices], [targets[i] for i in indices], self.model_config).to(self.device)
            total += float(self._cross_entropy(batch, 0.0))
            tokens += batch.num_target_tokens
        return total / tokens

    def _validation_scores(self, model: Transformer) -> tuple[float, float]:
        """Return greedy BLEU and chrF on the validation text, cased."""
        scores = evaluate(model.eval(), self.checkpoint.tokenizer, *self.validation)
        return scores.bleu, scores.chrf

    def _rate(self) -> float:
        return self.schedule.learning_rate_at(self.progression.step)

    def _is_out_of_patience(self) -> bool:
        return 0 < self.schedule.patience <= self.progression.validations_since_best

    def _validated(self) -> list[Path]:
        """Return the kept validated weights, oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

    def _weights_file(self) -> Path:
        """Return where the weights of the present step are kept once validated."""
        return self.folder / f"step-{self.progression.step:07d}.safetensors"

    def save_state(self) -> None:
        """Write everything a resumed run needs, atomically."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.checkpoint.model.named_parameters()}
        for name, parameter in self.checkpoint.model.named_parameters():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        save_tensors(self.folder / STATE_FILE, tensors, asdict(self.progression))

    def _load_state(self) -> None:
        """Take up where `save_state` left off."""
        with safe_open(self.folder / STATE_FILE, "pt", device=str(self.device)) as state:
            self.progression = Progression(**json.loads(state.metadata()["json"]))
            keys: list[str] = state.keys()
            for name, parameter in self.checkpoint.model.named_parameters():
                parameter.data.copy_(state.get_tensor(f"model.{name}"))
                prefix = f"optimizer.{name}."
                self.optimizer.state[parameter] = {
                    key.removeprefix(prefix): state.get_tensor(key) for key in keys if key.startswith(prefix)
                }
            torch.set_rng_state(state.get_tensor("rng.cpu").cpu())
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(state.get_tensor("rng.cuda").cpu(), self.device)

    def _refuse_other_configuration(self) -> None:
        """Write the configuration beside the state, or check that it is the one the run began with."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, text = self.folder / "config.json", json.dumps(asdict(self.config), indent=2) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise TrainingConfigError(f"{self.output} holds a run of another configuration; choose another output or remove it")
        write_text(path, text)


def _refuse_long_lines(path: Path, rows: list[list[int]], max_positions: int) -> None:
    """Refuse validation text that the model has no positions for; training text is left out instead."""
    for number, ids in enumerate(rows, start=1):
        if len(ids) >= max_positions:
            raise DataError(f"{path}, line {number}: {len(ids) + 1} tokens where the model has {max_positions} positions")


def progress_bar() -> Progress:
    """Return a bar with steps done, loss, tokens a second, elapsed time and time to go."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
