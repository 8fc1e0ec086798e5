"""Tokeniser files as the families' published checkpoints have them, trained on the licence's text.

Each maker writes files into a folder and returns the number of tokens that the model needs.
"""

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import ByteLevelBPETokenizer
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from tests.oracles.texts import training_lines

# fairseq's families were trained with these ids; the network has 3, 0, 2 for the file's 0, 1, 2.
FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
MARIAN_LANGUAGES = (">>fra<<", ">>deu<<", ">>spa_Latn<<")
MADLAD_LANGUAGES = ("<2de>", "<2fr>", "<2en>", "<2zh_Hant>")
MBART_LANGUAGES, MBART50_LANGUAGES, M2M100_LANGUAGES, M2M100_SPARE = 25, 52, 100, 8
PEGASUS_OFFSET = 103
_MARIAN = {"source_lang": "en", "target_lang": "de", "model_max_length": 512}
_NAMES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def trained(part: int | None = 0, **options: Any) -> bytes:
    """Train a SentencePiece model of some 300 pieces on a part of the text; the same model is trained once a process."""
    settings = {"vocab_size": 300, "character_coverage": 0.98, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    return _trained(part, json.dumps(settings | options, sort_keys=True))


@cache
def _trained(part: int | None, options: str) -> bytes:
    model = io.BytesIO()
    train: Any = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(training_lines(part)), model_writer=model, **json.loads(options))
    return model.getvalue()


def train(kind: str, size: int, ids: Mapping[str, int], symbols: Sequence[str] = (), part: int | None = 0) -> bytes:
    """Train a SentencePiece model of a kind ("unigram" or "bpe") that knows every character of the text."""
    named = {"model_type": kind, "vocab_size": size, "user_defined_symbols": list(symbols)}
    return trained(part, character_coverage=1.0, **named, **ids)


def marian(folder: Path, languages: Sequence[str] = ()) -> int:
    """Write `source.spm`, `target.spm` and one `vocab.json` for both, in its own order, padding last; some pieces have no id."""
    pieces = {piece: None for part in (0, 1) for piece in _pieces(_write_spm(folder, part))}
    known = [piece for i, piece in enumerate(pieces) if piece not in ("<s>", "</s>", "<unk>") and i % 97 != 96]
    Random(0).shuffle(known)
    names = ["</s>", "<unk>", *languages, *known, "<pad>"]
    _write(folder / "vocab.json", {name: i for i, name in enumerate(names)})
    _settings(folder, "MarianTokenizer", **_MARIAN, **_NAMES, separate_vocabs=False)
    return len(names)


def marian_pair(folder: Path) -> tuple[int, int]:
    """Write a vocabulary a side, the source's longer; padding has the same id in both. Return the number of tokens of each."""
    names: list[list[str]] = []
    for part in (0, 1):
        pieces = [piece for piece in _pieces(_write_spm(folder, part)) if piece not in ("<s>", "</s>", "<unk>")]
        Random(part).shuffle(pieces)
        names.append(["</s>", "<unk>", *pieces])
    source, target = names
    target = target[: len(source) - 40]
    source = [*source[: len(target)], "<pad>", *source[len(target) :]]
    for name, side in (("vocab.json", source), ("target_vocab.json", [*target, "<pad>"])):
        _write(folder / name, {piece: i for i, piece in enumerate(side)})
    _settings(folder, "MarianTokenizer", **_MARIAN, **_NAMES, separate_vocabs=True)
    return len(source), len(target) + 1


def m2m100(folder: Path) -> int:
    """Write `sentencepiece.bpe.model` and `vocab.json`; a hundred languages and eight unused tokens follow."""
    model = train("bpe", 300, FAIRSEQ)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    names = ["<s>", "<pad>", "</s>", "<unk>", *_pieces(model)[3:]]
    _write(folder / "vocab.json", {name: i for i, name in enumerate(names)})
    _settings(folder, "M2M100Tokenizer", language_codes="m2m100", num_madeup_words=M2M100_SPARE, src_lang="en", tgt_lang="de")
    return len(names) + M2M100_LANGUAGES + M2M100_SPARE


def nllb(folder: Path, **settings: Any) -> int:
    """Write `sentencepiece.bpe.model` (of the kind BPE); padding, 202 languages and a mask follow its pieces."""
    model = train("bpe", 300, FAIRSEQ)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn", "additional_special_tokens": FAIRSEQ_LANGUAGE_CODES}
    _settings(folder, "NllbTokenizer", **languages, **settings)
    return len(_pieces(model)) + 1 + len(FAIRSEQ_LANGUAGE_CODES) + 1


def languages_first(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Give NLLB's tokens the ids that published files give them: languages follow the pieces, the mask is last."""
    first = len(tokenizer["model"]["vocab"])
    ids = {name: first + i for i, name in enumerate((*FAIRSEQ_LANGUAGE_CODES, "<mask>"))}
    tokenizer["model"]["vocab"] |= ids
    added = [{**token, "id": ids.get(token["content"], token["id"])} for token in tokenizer["added_tokens"]]
    return {**tokenizer, "added_tokens": sorted(added, key=lambda token: int(token["id"])), "post_processor": None}


def mbart(folder: Path, is_fifty: bool = False) -> int:
    """Write `sentencepiece.bpe.model` (of the kind unigram, in spite of its name); the languages and a mask follow its pieces."""
    model = train("unigram", 300, FAIRSEQ)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    if is_fifty:
        _settings(folder, "MBart50Tokenizer", src_lang="en_XX", tgt_lang="de_DE", language_codes="mbart50")
    else:
        _settings(folder, "MBartTokenizer", src_lang="en_XX", tgt_lang="ro_RO")
    return len(_pieces(model)) + 1 + (MBART50_LANGUAGES if is_fifty else MBART_LANGUAGES) + 1


def pegasus(folder: Path) -> int:
    """Write `spiece.model`, whose ids from 2 on are 103 lower than the network's."""
    model = train("unigram", 300, T5)
    (folder / "spiece.model").write_bytes(model)
    _settings(folder, "PegasusTokenizer", offset=PEGASUS_OFFSET, model_max_length=512)
    return len(_pieces(model)) + PEGASUS_OFFSET


def t5(folder: Path, extra_ids: int = 100) -> int:
    """Write `spiece.model`; the network has some rows more than there are tokens, as published ones do."""
    model = train("unigram", 300, T5)
    (folder / "spiece.model").write_bytes(model)
    extra: dict[str, Any] = {"additional_special_tokens": [f"<extra_id_{i}>" for i in range(extra_ids)]} if extra_ids else {}
    _settings(folder, "T5Tokenizer", extra_ids=extra_ids, model_max_length=512, **_NAMES, **extra)
    return len(_pieces(model)) + extra_ids + (28 if extra_ids else 12)


def madlad(folder: Path) -> int:
    """Write `spiece.model` with a piece `<2xx>` a language; padding is its `<s>`.

    It knows every character of the texts: Transformers' class gives unknown ones T5's id, which is end-of-sequence here.
    """
    model = train("unigram", 320, FAIRSEQ, MADLAD_LANGUAGES, part=None)
    (folder / "spiece.model").write_bytes(model)
    names = _NAMES | {"pad_token": "<s>", "bos_token": "<s>"}
    _settings(folder, "T5Tokenizer", extra_ids=0, model_max_length=512, **names)
    return len(_pieces(model))


def byt5(folder: Path) -> int:
    """Write the settings of a tokeniser of bytes, which has no other file."""
    _settings(folder, "ByT5Tokenizer", extra_ids=125, **_NAMES)
    return 3 + 256 + 125


def bart(folder: Path) -> int:
    """Write `vocab.json` and `merges.txt`: byte-level BPE, the mask last."""
    tokenizer, special = ByteLevelBPETokenizer(), ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(training_lines(), vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.save_model(str(folder))
    names = [*json.loads((folder / "vocab.json").read_text(encoding="utf-8")), "<mask>"]
    _write(folder / "vocab.json", {name: i for i, name in enumerate(names)})
    _settings(folder, "BartTokenizer", model_max_length=1024)
    return len(names)


def _pieces(model: bytes) -> list[str]:
    """Parse SentencePiece's file; protobuf makes its class when the module is imported."""
    kind: Any = vars(sentencepiece_model_pb2)["ModelProto"]
    return [piece.piece for piece in kind.FromString(model).pieces]


def _write_spm(folder: Path, part: int) -> bytes:
    model = train("unigram", 260 - 20 * part, {"unk_id": 1, "eos_id": 0, "bos_id": -1, "pad_id": -1}, part=part)
    (folder / ("source.spm", "target.spm")[part]).write_bytes(model)
    return model


def _settings(folder: Path, tokenizer_class: str, **settings: Any) -> None:
    _write(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class, **settings})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
