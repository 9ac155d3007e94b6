"""A stand-in where FlashInfer would be."""

import sys
from types import ModuleType

import pytest

from tests.moe.flashinfer import stand_in


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Installed, with all of the package's rules."""
    module = stand_in.make_module()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(stand_in._Wrapper, "needs_halves", True)
    return module


@pytest.fixture
def exact_flashinfer(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same, and takes float32, so that results can be held to those of torch's attention."""
    monkeypatch.setattr(stand_in._Wrapper, "needs_halves", False)
    return flashinfer
