"""The native parts, which are optional: kernels, one file for each instruction set of which one is
chosen at run time, and the exchange between ranks of one host.

Everything else is in pyproject.toml. Where a file cannot be built, as without a compiler, torch
takes its place.
"""

import os
import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMMON = ["-O3", "-std=gnu++17", "-Wno-psabi", "-g0", "-fno-math-errno"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
FLAGS = {
    "kernels_avx2": ["-mavx2", "-mfma"],
    "kernels_avx512": [*AVX512, "-mfma"],
    "kernels_avx512_bf16": [*AVX512, "-mfma", "-mavx512bf16"],
}
NAMES = ("vectors", "team", "rows", "matmul", "pack", "attention", "draw")
HEADERS = [f"moe/native/{name}.h" for name in NAMES]


class build_native(build_ext):
    def build_extension(self, extension: Extension) -> None:
        """Objects apart, since all are made of the same source."""
        folder = self.build_temp
        self.build_temp = os.path.join(folder, extension.name)
        try:
            super().build_extension(extension)
        finally:
            self.build_temp = folder

    def get_export_symbols(self, extension: Extension) -> list[str]:
        """Called through ctypes: nothing is a Python module here."""
        return []


def extensions() -> list[Extension]:
    if platform.system() != "Linux":
        return []
    made = [
        Extension(
            "moed.dist.host.exchange",
            ["dist/host/exchange.cpp"],
            extra_compile_args=COMMON,
            extra_link_args=["-s"],
            language="c++",
            optional=True,
        )
    ]
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return made
    return made + [
        Extension(
            f"moed.moe.native.{name}",
            ["moe/native/kernels.cpp"],
            depends=HEADERS,
            extra_compile_args=[*COMMON, "-pthread", *flags],
            extra_link_args=["-s", "-pthread"],
            language="c++",
            optional=True,
        )
        for name, flags in FLAGS.items()
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": build_native})
