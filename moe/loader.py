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
from moed.config.quantization import Quantization
from moed.moe.block_scaled import BlockScaled
from moed.moe.quantization import PLAIN_DTYPES, Fp8Block, Part, StoredWeights, stored_weights
from moed.moe.text_part import text_names

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}
"""By safetensors' names; all others take one byte."""
# A table that old checkpoints carry, although it follows from config.json.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class Source(Protocol):
    """Where the builder's tensors come from."""

    device: torch.device

    def has(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...]:
        """As the tensor `name`, which `has`, is stored."""
        ...

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name` of `shape`, in the model's dtype, on `device`."""
        ...

    def get_float32(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name` in float32, as `shape`; stored, it may have other dims of 1."""
        ...

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        """Row `row` of the tensor `name` of `shape`, and no other byte of it."""
        ...

    def is_plain(self, name: str) -> bool:
        """Whether the tensor `name` is stored unquantised."""
        ...

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor `name` is stored in FP8 blocks."""
        ...

    def get_fp8(self, name: str, shape: Sequence[int]) -> BlockScaled:
        """The tensor `name` of `shape`, which `is_fp8`, as it is stored; scales in float32."""
        ...

    def skip(self, name: str) -> None:
        """Belongs to another rank, or is known not to be needed."""
        ...

    def skip_below(self, prefix: str) -> None:
        """All that begins with `prefix` is known not to be needed."""
        ...


class Checkpoint:
    """The safetensors files of a folder. Names and shapes are those that `Survey` has checked.

    A weight that lies in the files quantised, as its scales beside it show, has the name and shape
    that it has when it is plain, and is read into plain numbers.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
        is_multimodal: bool = False,
    ) -> None:
        """Of an `is_multimodal` one the text part alone. Raises `ModelError` for files that are
        missing or corrupt.
        """
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self._stored = stored_weights(quantization)
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        paths, indexed = _files(folder)
        for path in paths:
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
        astray = [name for name, path in indexed.items() if self._file_of.get(name) != path]
        if astray:
            raise ModelError(
                f"{folder / INDEX} is mixed up: {first_names(sorted(astray))} do not lie in the "
                "files that it names; download the checkpoint again"
            )
        # By the names that are asked for.
        self._stored_name = {name: name for name in self._file_of}
        if is_multimodal:
            self._stored_name = text_names(self._file_of)

    @property
    def names(self) -> set[str]:
        return set(self._stored_name)

    @property
    def names_of_other_parts(self) -> set[str]:
        """As they are stored."""
        return self._file_of.keys() - set(self._stored_name.values())

    def has(self, name: str) -> bool:
        return name in self._stored_name or self.quantized_as(name) is not None

    def quantized_as(self, name: str) -> StoredWeights | None:
        """The format in which the weight `name` lies in the files; None for a plain one."""
        stored = self._stored
        if stored is None:
            return None
        numbers = name + stored.suffixes[0]
        if numbers not in self._stored_name:
            return None
        is_quantized = numbers != name or self._header(name).get_dtype() == stored.number_dtype
        return stored if is_quantized else None

    def names_of(self, name: str) -> set[str]:
        """The tensors that hold the weight `name` together."""
        stored = self.quantized_as(name)
        return {name} if stored is None else {name + suffix for suffix in stored.suffixes}

    def problem(self, name: str, shape: Sequence[int]) -> str | None:
        """What is wrong with the weight that lies under `name`, from headers alone."""
        stored = self.quantized_as(name)
        if stored is not None and (obstacle := stored.obstacle(shape)):
            return f"{name} cannot be {stored.label}: {obstacle}"
        for part in self._parts(name, shape):
            if name + part.suffix not in self._stored_name:
                assert stored is not None
                return f"{name} is stored as {stored.label}, and lacks {name}{part.suffix}"
            if problem := self._part_problem(name + part.suffix, part):
                return problem
        return None

    def _part_problem(self, name: str, part: Part) -> str | None:
        found = self._header(name)
        stored_name = self._stored_name[name]
        where = f"{stored_name} in {self._file_of[stored_name].name}"
        if found.get_dtype() not in part.dtypes:
            return f"{where} has dtype {found.get_dtype()}, served are {', '.join(part.dtypes)}"
        if list(found.get_shape()) != list(part.shape):
            return f"{where} has shape {found.get_shape()}, config.json asks for {list(part.shape)}"
        return None

    def _parts(self, name: str, shape: Sequence[int]) -> tuple[Part, ...]:
        stored = self.quantized_as(name)
        return (Part("", PLAIN_DTYPES, tuple(shape)),) if stored is None else stored.parts(shape)

    def stored_bytes(self, name: str, shape: Sequence[int]) -> int:
        """Bytes of the files that hold the weight `name` of `shape`; a row of it has its share."""
        return sum(
            math.prod(part.shape) * DTYPE_BYTES.get(self._header(name + part.suffix).get_dtype(), 1)
            for part in self._parts(name, shape)
        )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """See `Source.shape_of`."""
        return tuple(self._header(name).get_shape())

    def _header(self, name: str) -> Any:
        stored_name = self._stored_name[name]
        return self._open[self._file_of[stored_name]].get_slice(stored_name)

    def _read(self, name: str) -> torch.Tensor:
        stored_name = self._stored_name[name]
        found: torch.Tensor = self._open[self._file_of[stored_name]].get_tensor(stored_name)
        return found

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See `Source.get`. On a CPU, and in the dtype of the file, it stays a view of the file."""
        read = [self._read(name + part.suffix) for part in self._parts(name, shape)]
        return self._plain(name, read, shape)

    def get_float32(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See `Source.get_float32`."""
        return self._read(name).to(self.device, torch.float32).view(tuple(shape))

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        """See `Source.get_row`."""
        read = [self._header(name + part.suffix)[row] for part in self._parts(name, shape)]
        return self._plain(name, read, shape[1:])

    def is_plain(self, name: str) -> bool:
        return self.quantized_as(name) is None

    def is_fp8(self, name: str) -> bool:
        return isinstance(self.quantized_as(name), Fp8Block)

    def get_fp8(self, name: str, shape: Sequence[int]) -> BlockScaled:
        """See `Source.get_fp8`."""
        values, scales = (self._read(name + part.suffix) for part in self._parts(name, shape))
        return BlockScaled(values.to(self.device), scales.to(self.device, torch.float32))

    def _plain(self, name: str, read: list[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        stored = self.quantized_as(name)
        if stored is None:
            return read[0].to(self.device, self.dtype)
        # Float32 in between, for one tensor at a time.
        moved = [part.to(self.device) for part in read]
        return stored.dequantize(moved, shape).to(self.dtype)

    def skip(self, name: str) -> None:
        """Nothing to do."""

    def skip_below(self, prefix: str) -> None:
        """Nothing to do."""


def first_names(names: list[str]) -> str:
    """Enough of them to see what they are."""
    rest = len(names) - 8
    return ", ".join(names[:8]) + (f" and {rest} more" if rest > 0 else "")


def _files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files with weights; and by the index, where there is one, which tensor lies in which."""
    index = folder / INDEX
    names: list[str] = [SINGLE_FILE]
    weight_map: dict[str, str] = {}
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            missing = [name for name in names if not (folder / name).is_file()]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(
                f"{index} cannot be read as an index of safetensors files: {error!r}"
            ) from None
    else:
        missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {first_names(missing)}: weights are read from {SINGLE_FILE}, or from "
            f"the files that {INDEX} lists; download the checkpoint again"
        )
    return [folder / name for name in names], {n: folder / f for n, f in weight_map.items()}


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

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Never asked for."""
        raise NotImplementedError

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Ones for norms; else normal, with a variance that keeps the size of the input."""
        if "norm" in name:
            return torch.ones(tuple(shape), dtype=self._dtype, device=self.device)
        mixed = hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "big") >> 1)
        random = torch.randn(tuple(shape), generator=generator) / math.sqrt(shape[-1])
        return random.to(self.device, self._dtype)

    def get_float32(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return self.get(name, shape).float()

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        return self.get(f"{name} {row}", shape[1:])

    def is_plain(self, name: str) -> bool:
        return True

    def is_fp8(self, name: str) -> bool:
        return False

    def get_fp8(self, name: str, shape: Sequence[int]) -> BlockScaled:
        """Never asked for."""
        raise NotImplementedError

    def skip(self, name: str) -> None:
        """Nothing to do."""

    def skip_below(self, prefix: str) -> None:
        """Nothing to do."""
