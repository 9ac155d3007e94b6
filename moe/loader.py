"""Reading a checkpoint: only what this rank needs, tensor by tensor, from mapped files."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moed.config.errors import ModelError

Report = Callable[[str], None]


class Source:
    """Where tensors come from: `get` each by name, then `finish`."""

    def has(self, name: str) -> bool:
        raise NotImplementedError

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    def skip(self, name: str) -> None:
        """Another rank reads it."""

    def finish(self) -> None:
        """Raises `ModelError` when tensors of the checkpoint were neither read nor skipped."""


class Checkpoint(Source):
    """The safetensors files of a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ModelError` for files that are missing or corrupt."""
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._done: set[str] = set()
        for path in _files(folder):
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from None
            for name in self._open[path].keys():
                self._file_of[name] = path

    def has(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor, in the model's dtype, on its device. Raises `ModelError` when it is missing
        or has another shape.
        """
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"{self._folder} has no tensor {name}")
        self._done.add(name)
        found = self._open[path].get_slice(name)
        if list(found.get_shape()) != list(shape):
            raise ModelError(
                f"{path.name}: {name} has shape {found.get_shape()}, and config.json asks for "
                f"{list(shape)}"
            )
        try:
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read at {name}: {error}") from None
        return tensor.to(self._device, self._dtype)

    def skip(self, name: str) -> None:
        self._done.add(name)

    def finish(self) -> None:
        unused = sorted(set(self._file_of) - self._done)
        if unused:
            shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if unused[5:] else "")
            raise ModelError(
                f"{self._folder} has tensors that the model does not use: {shown}. The checkpoint "
                "is of another model than its config.json says."
            )
        self._open.clear()


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read: {error}") from None
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing[:5])} ({len(missing)} file(s))")
    return [folder / name for name in names]


class Dummy(Source):
    """Random weights: each tensor a function of (seed, its name), whoever asks for it."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        return "experts.gate_up_proj" not in name

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(tuple(shape), dtype=self._dtype, device=self._device)
        mixed = sum(ord(letter) * 31**index % 2**31 for index, letter in enumerate(name))
        generator = torch.Generator().manual_seed((self._seed + mixed) % 2**63)
        scale = 1.0 / math.sqrt(shape[-1])
        random = torch.randn(tuple(shape), generator=generator) * scale
        return random.to(self._device, self._dtype)
