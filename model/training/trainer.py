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
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from dragoman.model.checkpoint import Checkpoint, average_weights, save_tensors
from dragoman.model.config import ModelConfigError
from dragoman.model.files import write_text
from dragoman.model.growth import grown
from dragoman.model.networks.architectures import network
from dragoman.model.networks.network import Network
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.model.training.config import TrainingConfigError
from dragoman.model.training.data import Batch, collate
from dragoman.model.training.log import STEP_FIELDS, STEPS_FILE, VALIDATION_FIELDS, VALIDATION_FILE, CsvLog, Measured, plot_curves
from dragoman.model.training.loss import projected_cross_entropy
from dragoman.model.training.preparation import Preparation
from dragoman.model.training.progress import TrainingProgress
from dragoman.model.training.record import FOLDER, STATE_FILE
from dragoman.model.training.sampler import bucket
from dragoman.model.training.validation import Validation

SUMMARY_FILE = "summary.json"
SAVE_SECONDS = 60.0


@dataclass(slots=True)
class Progression:
    """Where a run is; with the tensors beside it in the state file, all that a resumed run needs."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best_rank: float = -math.inf
    validations_since_best: int = 0
    validated_step: int = 0
    seconds: float = 0.0


class Trainer:
    """One training run."""

    def __init__(self, prepared: Preparation, device: torch.device, save_seconds: float = SAVE_SECONDS) -> None:
        """Build the model, or take up the run that was stopped in the prepared output.

        Args:
            prepared: What to do, with what.
            device: Where to compute.
            save_seconds: Time between two saved states, which is what a kill can cost.

        Raises:
            CheckpointError: If the weights to go on from cannot be read.
            TrainingConfigError: If the state to resume cannot be.
        """
        self.prepared, self.config, self.schedule = prepared, prepared.config, prepared.config.training
        self.output, self.device, self.save_seconds = prepared.output, device, save_seconds
        self.folder = prepared.output / FOLDER
        self.model_config, self.sampler, self.validation = prepared.model_config, prepared.sampler, prepared.validation
        initial = Checkpoint.load(Path(self.config.initial_checkpoint)) if self.config.initial_checkpoint else None
        torch.manual_seed(self.schedule.seed)
        try:
            model = grown(initial.model, self.model_config) if initial else network(self.model_config)
        except ModelConfigError as error:
            raise TrainingConfigError(f"initial_checkpoint: {error}") from error
        model.to(device)
        self.checkpoint = Checkpoint(self.config.name, model, Tokenizers.shared(prepared.tokenizer))
        self.yardstick = Validation(
            self.model_config, self.checkpoint.tokenizers, prepared.validation, self.schedule.max_tokens, self._cross_entropy
        )
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            betas=(self.schedule.adam_beta1, self.schedule.adam_beta2),
            eps=1e-9,
            weight_decay=self.schedule.weight_decay,
            fused=True,
        )
        prepared.record.write(self.output)
        self.progression = Progression()
        if (self.folder / STATE_FILE).exists():
            self._load_state()
        self.steps_log = CsvLog(self.folder / STEPS_FILE, STEP_FIELDS, self.progression.step)
        self.validation_log = CsvLog(self.folder / VALIDATION_FILE, VALIDATION_FIELDS, self.progression.validated_step)
        self._progress = TrainingProgress()

    def run(self, progress: TrainingProgress | None = None) -> None:
        """Train to `max_steps` or until patience runs out, then average, pick the better model and draw the curves."""
        self._progress = progress or TrainingProgress()
        self._progress.begin(self.config.name, self.schedule.max_steps, self.progression.step)
        try:
            self._train()
            self.save_state()
            self._finish()
        finally:
            self._progress.end()
            self.close()

    def _train(self) -> None:
        """Do the remaining steps, logging each and saving the state now and then."""
        started = time.monotonic() - self.progression.seconds
        saved = time.monotonic()
        for batch in self._remaining_batches():
            before = time.monotonic()
            loss, norm = self._step(batch)
            now = time.monotonic()
            state, seconds = self.progression, now - before
            state.seconds = now - started
            self.steps_log.write(state.step, state.epoch, loss, self._rate(), norm, batch.num_target_tokens, round(seconds, 4))
            self._progress.stepped(state.step, loss, batch.num_target_tokens, seconds)
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
        while state.step < schedule.max_steps and not (0 < schedule.patience <= state.validations_since_best):
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
        model, schedule = self.checkpoint.model, self.schedule
        if not schedule.r_drop:
            return self._cross_entropy(model, batch, schedule.label_smoothing)
        hidden = torch.stack(self._hidden(model, batch.repeated(2)).chunk(2))
        return self._projected(model, hidden, batch.labels, schedule.label_smoothing, schedule.r_drop)

    def _cross_entropy(self, model: Network, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the summed cross-entropy of a batch."""
        return self._projected(model, self._hidden(model, batch), batch.labels, smoothing)

    def _projected(self, model: Network, hidden: Tensor, labels: Tensor, smoothing: float, r_drop: float | None = None) -> Tensor:
        decoder, pad_id = model.decoder, self.model_config.pad_id
        return projected_cross_entropy(hidden, decoder.output_weight, decoder.output_bias, labels, pad_id, smoothing, r_drop)

    def _hidden(self, model: Network, batch: Batch) -> Tensor:
        """Return what the vocabulary projection is applied to: `[B, T, d_model]`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.schedule.is_bf16):
            return model.decode(batch.target_ids, *model.encode(batch.source_ids, batch.source_lengths))

    def _validate(self) -> None:
        """Score the validation text, log it, keep the weights, and publish them as the checkpoint when they are the best so far."""
        state, model = self.progression, self.checkpoint.model
        measured = self.yardstick.measure(model, self.device)
        self.validation_log.write(state.step, state.epoch, measured.loss, measured.bleu, measured.chrf)
        weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        save_tensors(self.folder / f"step-{state.step:07d}.safetensors", weights)
        for old in self._validated()[: -self.schedule.average_last]:
            old.unlink()
        state.validated_step = state.step
        state.validations_since_best += 1
        if measured.rank > state.best_rank:
            state.best_rank, state.validations_since_best = measured.rank, 0
            self.checkpoint.save(self.output)
        self._progress.validated(state.step, measured, state.best_rank)
        plot_curves(self.folder)

    def _finish(self) -> None:
        """Average the newest validated weights and publish them if they beat the best single checkpoint."""
        if self.progression.validated_step < self.progression.step:
            self._validate()
            self.save_state()
        model = network(self.model_config).to(self.device)
        averaged = average_weights(self._validated())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(averaged[name])
        measured = self.yardstick.measure(model, self.device)
        is_better = measured.rank >= self.progression.best_rank
        if is_better:
            Checkpoint(self.config.name, model, self.checkpoint.tokenizers).save(self.output)
        summary = self._summary(measured) | {
            "num_pairs": self.sampler.num_pairs,
            "num_pairs_left_out": self.sampler.num_left_out,
            "averaged_checkpoints": len(self._validated()),
            "published": "averaged" if is_better else "best",
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "device": str(self.device),
            "num_threads": torch.get_num_threads(),
            "text": self.prepared.record.text,
            "chosen": self.prepared.record.chosen,
        }
        write_text(self.folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")

    def _summary(self, averaged: Measured) -> dict[str, Any]:
        """Return where the run has ended, and how good the best validated weights and the averaged ones are."""
        fields = asdict(self.progression)
        best = fields.pop("best_rank")
        if averaged.bleu is None:
            return fields | {"best_loss": -best, "averaged_loss": averaged.loss}
        return fields | {"best_bleu": best, "averaged_bleu": averaged.bleu, "averaged_chrf": averaged.chrf}

    def _rate(self) -> float:
        return self.schedule.learning_rate_at(self.progression.step)

    def _validated(self) -> list[Path]:
        """Return the kept validated weights, oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

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
            self.progression = _progression(json.loads(state.metadata()["json"]))
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


def _progression(fields: dict[str, Any]) -> Progression:
    """Read where a run is; one that began when BLEU alone was a measure calls its best so."""
    if "best_bleu" in fields:
        fields["best_rank"] = fields.pop("best_bleu")
    return Progression(**fields)
