"""The forward pass on a CPU in C++, where it could be built; each part has a torch twin."""

from moed.moe.native.binding import Library, arguments, describe, library, use_kernels

__all__ = ["Library", "arguments", "describe", "library", "use_kernels"]
