"""Reading a checkpoint: only what this rank needs, tensor by tensor, from mapped files."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from moed.config.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Integers and 8-bit floats are quantized formats, whose scales a plain cast would lose.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
# A table that old checkpoints carry, although it follows from config.json.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class Source(Protocol):
    """Where the builder's tensors come from."""

    device: torch.device

    def has(self, name: str) -> bool: ...

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name` of `shape`, in the model's dtype, on `device`."""
        ...

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        """Row `row` of the tensor `name` of `shape`, and no other byte of it."""
        ...

    def skip(self, name: str) -> None:
        """Belongs to another rank, or is known not to be needed."""
        ...


class Checkpoint:
    """The safetensors files of a folder. Names and shapes are those that `Survey` has checked."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ModelError` for files that are missing or corrupt."""
        self.folder = folder
        self.device = device
        self._dtype = dtype
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for path in _files(folder):
            try:
                # Maps the file and reads its header, which tells the length of the whole.
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} cannot be read, as if cut short or damaged: {error}"
                ) from None
            for name in self._open[path].keys():
                if name in self._file_of:
                    raise ModelError(f"{name} lies in both {self._file_of[name]} and {path}")
                self._file_of[name] = path

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def problem(self, name: str, shape: Sequence[int]) -> str | None:
        """What is wrong with the tensor that lies under `name`, from its header alone."""
        found = self._open[self._file_of[name]].get_slice(name)
        where = f"{name} in {self._file_of[name].name}"
        if found.get_dtype() not in PLAIN_DTYPES:
            return f"{where} has dtype {found.get_dtype()}, served are {', '.join(PLAIN_DTYPES)}"
        if list(found.get_shape()) != list(shape):
            return f"{where} has shape {found.get_shape()}, config.json asks for {list(shape)}"
        return None

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See `Source.get`. On a CPU, and in the dtype of the file, it stays a view of the file."""
        tensor: torch.Tensor = self._open[self._file_of[name]].get_tensor(name)
        return tensor.to(self.device, self._dtype)

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        """See `Source.get_row`."""
        tensor: torch.Tensor = self._open[self._file_of[name]].get_slice(name)[row]
        return tensor.to(self.device, self._dtype)

    def skip(self, name: str) -> None:
        """Nothing to do."""


class Survey:
    """Goes over a checkpoint before anything is read, and names all that does not fit at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.device = torch.device("meta")
        self._checkpoint = checkpoint
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self._known: set[str] = set()

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor without storage."""
        if name not in self._known:
            self._known.add(name)
            if not self._checkpoint.has(name):
                self._missing.append(name)
            elif problem := self._checkpoint.problem(name, shape):
                self._wrong.append(problem)
        return torch.empty(tuple(shape), device=self.device)

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        return self.get(name, shape)[row]

    def skip(self, name: str) -> None:
        self._known.add(name)

    def finish(self) -> None:
        """Raises `ModelError` naming missing, misshapen and unused tensors."""
        unused = sorted(
            name
            for name in self._checkpoint.names - self._known
            if not name.endswith(DERIVED_SUFFIX)
        )
        problems = [
            f"{what} {_first(names)}"
            for what, names in (
                ("tensors are missing:", self._missing),
                ("tensors do not fit:", self._wrong),
                ("tensors are not used by the model that config.json describes:", unused),
            )
            if names
        ]
        if problems:
            raise ModelError(f"{self._checkpoint.folder}: " + "; ".join(problems))


def _first(names: list[str]) -> str:
    rest = len(names) - 8
    return ", ".join(names[:8]) + (f" and {rest} more" if rest > 0 else "")


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    names: list[str] = [SINGLE_FILE]
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            missing = [name for name in names if not (folder / name).is_file()]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(
                f"{index} cannot be read as an index of safetensors files: {error!r}"
            ) from None
    else:
        missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {_first(missing)}: weights are read from {SINGLE_FILE}, or from the "
            f"files that {INDEX} lists; download the checkpoint again"
        )
    return [folder / name for name in names]


class Dummy:
    """Random weights. Each is a function of the seed and its own name, whichever rank asks: so the
    model is the same for any number of ranks.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._seed = seed
        self._dtype = dtype

    def has(self, name: str) -> bool:
        """Experts are asked for one by one."""
        return False

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Ones for norms; else normal, with a variance that keeps the size of the input."""
        if "norm" in name:
            return torch.ones(tuple(shape), dtype=self._dtype, device=self.device)
        mixed = hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "big") >> 1)
        random = torch.randn(tuple(shape), generator=generator) / math.sqrt(shape[-1])
        return random.to(self.device, self._dtype)

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        return self.get(f"{name} {row}", shape[1:])

    def skip(self, name: str) -> None:
        """Nothing to do."""
