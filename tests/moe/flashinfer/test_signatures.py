"""The calls that the stand-in takes are the installed package's, where there is one."""

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from moed.dist.deep_ep.extract_signatures import describe, find_class, functions_of
from tests.moe.flashinfer import stand_in
from tests.moe.flashinfer.extract_signatures import METHODS

DECODE, PREFILL = METHODS["flashinfer/decode.py"], METHODS["flashinfer/prefill.py"]


def test_the_table_holds_what_is_known_of_the_package() -> None:
    """Figures that were read by hand in the source of this version."""
    assert stand_in.TABLE["version"] == "0.7.4"
    (decode,), (prefill,) = DECODE, PREFILL
    counts = {
        (name, method): len(parameters) - 1
        for name, methods in stand_in.TABLE["classes"].items()
        for method, parameters in methods.items()
    }
    assert counts[decode, "__init__"] == 10 and counts[prefill, "__init__"] == 14
    assert counts[decode, "_plan_impl"] == 26 and counts[prefill, "plan"] == 36


def test_an_unknown_argument_is_refused() -> None:
    wrapper: Any = stand_in.BatchDecodeWithPagedKVCacheWrapper
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_len'"):
        wrapper(torch.zeros(128 * 2**20, dtype=torch.uint8), max_len=3)
    published = stand_in.signature("BatchDecodeWithPagedKVCacheWrapper", "run")
    kinds = [parameter.kind for parameter in published.parameters.values()]
    assert kinds.count(inspect.Parameter.KEYWORD_ONLY) == 12


def test_the_table_is_that_of_the_installed_package() -> None:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed: the table stands unchecked")
    classes: dict[str, Any] = stand_in.TABLE["classes"]
    for file, methods_by_class in METHODS.items():
        tree = ast.parse((Path(spec.origin).parents[1] / file).read_text())
        for name, methods in methods_by_class.items():
            functions = functions_of(find_class(tree, name).body)
            for method in methods:
                assert describe(functions[method])["parameters"] == classes[name][method]
