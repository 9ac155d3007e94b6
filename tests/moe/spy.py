"""What is read of a safetensors file."""

from typing import Any

import torch


class Spy:
    """Stands for an open file, and notes what is read from it."""

    def __init__(self, file: Any, reads: list[str]) -> None:
        self._file = file
        self._reads = reads

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        self._reads.append(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def get_slice(self, name: str) -> "SpySlice":
        return SpySlice(self._file.get_slice(name), name, self._reads)


class SpySlice:
    def __init__(self, part: Any, name: str, reads: list[str]) -> None:
        self._part = part
        self._name = name
        self._reads = reads
        self.get_shape = part.get_shape
        self.get_dtype = part.get_dtype

    def __getitem__(self, row: int) -> torch.Tensor:
        self._reads.append(f"{self._name}[{row}]")
        tensor: torch.Tensor = self._part[row]
        return tensor
