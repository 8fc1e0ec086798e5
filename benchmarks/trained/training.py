"""Trains a small model of a family with Transformers' own Trainer, and saves it with `save_pretrained`, as its users do."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    Adafactor,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

from benchmarks.trained.families import MAX_LENGTH, Family
from dragoman.model.corpus import read_parallel

SEED = 1


class Pairs(Dataset[dict[str, list[int]]]):
    """Translation pairs as ids."""

    def __init__(self, family: Family, tokenizer: Any, sources: Sequence[str], targets: Sequence[str]) -> None:
        encoded = tokenizer([family.prefix + text for text in sources], max_length=MAX_LENGTH, truncation=True)["input_ids"]
        labels = tokenizer(text_target=list(targets), max_length=MAX_LENGTH, truncation=True)["input_ids"]
        self._pairs = [{"input_ids": source, "labels": target} for source, target in zip(encoded, labels, strict=True)]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._pairs[index]


class Limit(TrainerCallback):
    """Ends training, with a checkpoint, when the time is up or Ctrl-C is pressed.

    Attributes:
        is_interrupted: Whether it was Ctrl-C.
    """

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + 60 * minutes
        self.is_interrupted = False
        signal.signal(signal.SIGINT, self._interrupt)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """See `TrainerCallback`."""
        if self.is_interrupted or time.monotonic() > self._until:
            control.should_save = control.should_training_stop = True

    def _interrupt(self, number: int, frame: object) -> None:
        self.is_interrupted = True


class ZeroStart(TrainerCallback):
    """Keeps the embedding of a token at zero."""

    def __init__(self, token: int) -> None:
        self._token = token

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """See `TrainerCallback`."""
        model.get_input_embeddings().weight.data[self._token] = 0


def train(family: Family, data: Path, folder: Path, minutes: float) -> bool:
    """Train, going on from the last checkpoint if there is one, and write `folder/model`; return whether it was not interrupted."""
    set_seed(SEED)
    files = folder / "tokenizer"
    files.mkdir(parents=True, exist_ok=True)
    texts = {name: read_parallel(data / f"{name}.en.gz", data / f"{name}.de.gz") for name in ("train", "val")}
    tokenizer = family.tokenizer(*texts["train"], files)
    model = family.model(tokenizer)
    limit = Limit(minutes)
    callbacks = [limit, EarlyStoppingCallback(early_stopping_patience=3)]
    if family.has_zero_start:
        callbacks.append(ZeroStart(model.config.decoder_start_token_id))
    optimizer = None
    if family.has_relative_steps:
        adafactor: Any = Adafactor
        optimizer = adafactor(model.parameters(), lr=family.learning_rate, scale_parameter=True, relative_step=False)
    trainer: Any = Seq2SeqTrainer(
        model=model,
        optimizers=(optimizer, None),
        args=arguments(family, folder / "checkpoints"),
        train_dataset=Pairs(family, tokenizer, *texts["train"]),
        eval_dataset=Pairs(family, tokenizer, *texts["val"]),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=any((folder / "checkpoints").glob("checkpoint-*")))
    model.eval().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return not limit.is_interrupted


def arguments(family: Family, folder: Path) -> Any:
    """Return how the Trainer is to go about it."""
    torch.set_num_threads(1)
    return Seq2SeqTrainingArguments(
        output_dir=str(folder),
        num_train_epochs=family.num_epochs,
        per_device_train_batch_size=family.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=family.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=400,
        weight_decay=0.01,
        adam_beta2=0.98,
        label_smoothing_factor=0.1,
        train_sampling_strategy="group_by_length",
        logging_steps=50,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=0,
        seed=SEED,
    )
