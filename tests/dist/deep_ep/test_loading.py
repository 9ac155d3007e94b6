"""A deep_ep that is missing, broken, old or new."""

import subprocess
import sys
from pathlib import Path

import pytest

from moed.dist.deep_ep.loading import DeepEP, Unavailable, find_deep_ep

PACKAGES = {
    "version_2": ("class Buffer: pass\nclass ElasticBuffer: pass", DeepEP),
    "version_1": ("class Buffer: pass", DeepEP),
    "another": ("class Other: pass", Unavailable),
    "without_libraries": (
        "raise ImportError('libc10_cuda.so: cannot open\\nshared object file')",
        Unavailable,
    ),
    "without_nccl": ("assert False, 'Cannot find package: nccl'", Unavailable),
    "without_words": ("assert False", Unavailable),
}
REASONS = {
    "another": "the installed deep_ep has no class Buffer",
    "without_libraries": "ImportError: libc10_cuda.so: cannot open",
    "without_nccl": "AssertionError: Cannot find package: nccl",
    "without_words": "AssertionError",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_it_is_found_or_a_reason_is_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = PACKAGES[name]
    (tmp_path / "deep_ep.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    found = find_deep_ep()
    sys.modules.pop("deep_ep", None)
    assert isinstance(found, expected)
    if isinstance(found, DeepEP):
        assert found.has_elastic_buffer == (name == "version_2")
    else:
        assert found.reason == REASONS[name]


def test_one_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    found = find_deep_ep()
    assert isinstance(found, Unavailable) and "deep_ep" in found.reason


def test_asking_costs_no_import_before() -> None:
    """`moed --help` lists backends, and torch takes seconds to import."""
    code = "import sys, moed.dist.deep_ep.loading; print({'torch', 'deep_ep'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "set()", run.stderr
