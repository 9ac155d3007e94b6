"""MODEL as a directory or as `org/name` on the Hugging Face Hub."""

import re
from pathlib import Path

from moed.config.errors import ModelError

REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors",)
# Copies of the weights in other layouts, which some repositories hold beside the usual one.
IGNORED_FILES = ("original/*", "metal/*", "onnx/*")


def fetch(
    model: str, revision: str | None, offline: bool, token: str | None, weights: bool
) -> Path:
    """The local directory of `model`, downloaded when it is an `org/name` that is not cached.

    One download per node: call it before ranks start; processes that call it together wait for
    each other at the Hub cache's own locks. `weights` False takes only configuration and tokenizer.
    Raises `ModelError` when there is no such directory, or the download is refused.
    """
    if model and Path(model).is_dir():
        return Path(model)
    if not REPO_ID.fullmatch(model) or model.startswith((".", "~")):
        raise ModelError(
            f"no such directory: {model!r}. MODEL is a directory that holds config.json and "
            "*.safetensors, or org/name on the Hugging Face Hub"
        )
    # Takes half a second to import, which a directory does not need to pay.
    import huggingface_hub
    from huggingface_hub import errors

    patterns = [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        path = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            local_files_only=offline,
            token=token,
            allow_patterns=patterns,
            ignore_patterns=list(IGNORED_FILES),
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{model} is gated: accept its terms at https://huggingface.co/{model}, and set "
            "HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{model} has no revision {revision!r}: --revision takes a branch, tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{model} is neither a directory here nor a model on the Hugging Face Hub that can be "
            "read; check the name, and set HF_TOKEN when it is private"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if offline:
            raise ModelError(
                f"{model} is not in the local Hub cache, and --offline forbids a download: run "
                "once without --offline, or give a directory"
            ) from error
        raise ModelError(
            f"{model} is not in the local Hub cache, and the Hub cannot be reached ({error}); "
            "check the network, or give a directory"
        ) from error
    except Exception as error:
        # Disk, network, proxy: the Hub's client lets its HTTP library's own errors through.
        raise ModelError(f"downloading {model} failed: {error}") from error
    return Path(path)
