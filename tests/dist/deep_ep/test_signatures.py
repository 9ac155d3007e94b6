"""The stand-in's calls are DeepEP's own, name by name; and the table of them is up to date."""

import ast
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from moed.dist.deep_ep.extract_signatures import METHODS, SIGNATURES, extract, write
from moed.dist.deep_ep.rules import Mode
from moed.dist.deep_ep.stand_in import StandIn, make_stand_in

TABLE = json.loads(SIGNATURES.read_text())
CLASSES: dict[str, Any] = TABLE["classes"]


def described(cls: type, method: str) -> dict[str, Any]:
    """One method as the table describes it, without what is returned."""
    parameters = inspect.signature(getattr(cls, method)).parameters.values()
    return {
        "is_static": isinstance(inspect.getattr_static(cls, method), staticmethod),
        "parameters": [
            [
                parameter.name,
                parameter.kind.description,
                None if parameter.default is inspect.Parameter.empty else repr(parameter.default),
            ]
            for parameter in parameters
        ],
    }


def differences(stand_in: StandIn) -> list[str]:
    """Methods that differ from the table, or are missing."""
    wrong = []
    for class_name, methods in CLASSES.items():
        cls = getattr(stand_in, class_name)
        for method, expected in methods.items():
            expected = {key: expected[key] for key in ("is_static", "parameters")}
            if not hasattr(cls, method) or described(cls, method) != expected:
                wrong.append(f"{class_name}.{method}")
    return wrong


@pytest.mark.parametrize("mode", Mode)
def test_every_call_of_the_stand_in_is_deep_eps(mode: Mode) -> None:
    assert differences(make_stand_in(mode)) == []


def test_a_missing_parameter_is_noticed() -> None:
    stand_in = make_stand_in("strict")

    class WithoutShrink(stand_in.Buffer):  # type: ignore[name-defined,misc]
        def __init__(
            self,
            group: Any,
            num_nvl_bytes: int = 0,
            num_rdma_bytes: int = 0,
            low_latency_mode: bool = False,
            num_qps_per_rank: int = 24,
            allow_nvlink_for_low_latency_mode: bool = True,
            allow_mnnvl: bool = False,
            explicitly_destroy: bool = False,
            comm: Any = None,
        ) -> None:
            pass

        @staticmethod
        def get_dispatch_layout(topk_idx: Any, num_experts: int) -> None:
            pass

    older = StandIn(**{**vars(stand_in), "Buffer": WithoutShrink})
    assert differences(older) == ["Buffer.__init__", "Buffer.get_dispatch_layout"]


def test_the_table_holds_what_is_known_of_the_package() -> None:
    """Figures that were read by hand in the source of this version."""
    assert TABLE["version"] == "2.1.0.post20260810"
    assert {"Buffer", "ElasticBuffer", "Config", "topk_idx_t"} <= set(TABLE["exports"])
    returned = {
        f"{name}.{method}": entry["num_returned"]
        for name, methods in CLASSES.items()
        for method, entry in methods.items()
        if entry["num_returned"] is not None
    }
    assert returned == {
        "Buffer.get_dispatch_layout": 5,
        "Buffer.dispatch": 6,
        "Buffer.combine": 3,
        "Buffer.low_latency_dispatch": 5,
        "Buffer.low_latency_combine": 3,
        "ElasticBuffer.dispatch": 5,
        "ElasticBuffer.combine": 3,
    }
    assert len(CLASSES["ElasticBuffer"]["dispatch"]["parameters"]) == 20


def test_the_table_is_that_of_the_installed_package() -> None:
    spec = importlib.util.find_spec("deep_ep")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("deep_ep is not installed: the table stands unchecked")
    assert extract(Path(next(iter(spec.submodule_search_locations)))) == TABLE


SOURCE = """
class {name}:
    @staticmethod
    def hint(a, b: int = 2 ** 3) -> int:
        return a + b

    def call(self, x, /, y=None, *args, z, w=(1, 2), **more):
        def inner():
            return 1, 2, 3
        if y:
            return self.other()
        for _ in x:
            try:
                return 1, (2 if y else 3), 4, 5
            except ValueError:
                pass
        return x, y, z, w

    def unlike(self):
        if self:
            return 1, 2
        return 1, 2, 3
"""


def test_every_form_of_signature_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text(
        "if True:\n    import os\nfrom .one import Thing\nfrom os import path\n__version__ = '9'\n"
    )
    (package / "one.py").write_text(SOURCE.format(name="Thing"))
    methods = {"one.py": {"Thing": ("hint", "call", "unlike")}}
    monkeypatch.setattr("moed.dist.deep_ep.extract_signatures.METHODS", methods)
    found = extract(package)
    assert (found["version"], found["exports"]) == ("9", ["Thing"])
    thing = found["classes"]["Thing"]
    assert thing["hint"] == {
        "is_static": True,
        "num_returned": None,
        "parameters": [
            ["a", "positional or keyword", None],
            ["b", "positional or keyword", "2 ** 3"],
        ],
    }
    assert thing["call"]["num_returned"] == 4
    assert thing["unlike"]["num_returned"] is None
    assert thing["call"]["parameters"] == [
        ["self", "positional-only", None],
        ["x", "positional-only", None],
        ["y", "positional or keyword", "None"],
        ["args", "variadic positional", None],
        ["z", "keyword-only", None],
        ["w", "keyword-only", "(1, 2)"],
        ["more", "variadic keyword", None],
    ]
    write(found, tmp_path / "table.json")
    assert json.loads((tmp_path / "table.json").read_text()) == found


def test_another_package_is_refused(tmp_path: Path) -> None:
    for name in ("__init__.py", *METHODS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(LookupError, match="no class Buffer"):
        extract(tmp_path)


def test_the_script_imports_nothing_of_the_package() -> None:
    source = Path(inspect.getfile(extract)).read_text()
    names = [
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert names == ["ast", "hashlib", "json", "re", "sys"]
