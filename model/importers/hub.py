"""Repositories of the Hugging Face hub, of which only the files are fetched that an import reads."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dragoman.model.importers.files import INDEX_SUFFIX, PICKLED, SAFETENSORS, ForeignError, words

# "t5-small", "Helsinki-NLP/opus-mt-en-de"
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DESCRIPTIONS: Final = words(
    """
    config.json generation_config.json tokenizer_config.json special_tokens_map.json added_tokens.json adapter_config.json
    tokenizer.json vocab.json target_vocab.json merges.txt source.spm target.spm spiece.model sentencepiece.bpe.model
    """
)


def is_name(text: str) -> bool:
    """Return whether a repository could have this name."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def fetch(name: str, revision: str | None = None) -> Path:
    """Fetch a repository's files, but for those in the cache, and return their folder; `revision` is a branch, a tag or a commit.

    Raises:
        ForeignError: If there is no network and nothing in the cache, no such repository or revision, or it asks for an account.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ForeignError(
            f"{name}: no such folder; fetching it from the hub needs the package huggingface-hub, of the extra `import`"
        ) from error
    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision)
        present = [str(sibling.rfilename) for sibling in info.siblings or ()]
        return Path(huggingface_hub.snapshot_download(name, revision=info.sha, allow_patterns=needed(present)))
    except errors.GatedRepoError as error:
        raise ForeignError(f"{name}: its owners ask for an account that has agreed to their terms: `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise ForeignError(f"{name}: the repository has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ForeignError(f"{name}: neither a folder nor, to us, a repository of the hub") from error
    except errors.HFValidationError as error:
        raise ForeignError(f"{name}: neither a folder nor the name of a repository") from error
    except Exception as error:  # any of its HTTP library, where there is no network
        try:
            return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
        except (OSError, ValueError):
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ForeignError(f"{name}: no such folder, and the hub cannot be reached: {reason}") from error


def needed(present: Sequence[str]) -> list[str]:
    """Return those of a repository's files that an import reads: descriptions, and its weights in one form."""
    files = [name for name in present if name in _DESCRIPTIONS]
    for whole in (SAFETENSORS, PICKLED):
        stem, suffix = whole.rsplit(".", 1)
        if whole in present:
            return [*files, whole]
        if f"{whole}{INDEX_SUFFIX}" in present:
            shards = [name for name in present if name.startswith(f"{stem}-") and name.endswith(f".{suffix}")]
            return [*files, f"{whole}{INDEX_SUFFIX}", *shards]
    return files
