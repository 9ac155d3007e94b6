"""Arrows run one way only: server → moe → dist → config; and only config reads the environment."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "config": {"dist", "moe", "server"},
    "dist": {"moe", "server"},
    "moe": {"server"},
    "server": set(),
}
ENVIRONMENT_READERS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def sources(root: str) -> list[Path]:
    return sorted((ROOT / root).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_roots(code: str) -> set[str]:
    names = (name.split(".") for name in imported_modules(ast.parse(code)))
    return {name[1] for name in names if name[0] == "moed" and len(name) > 1}


def reads_environment(code: str) -> bool:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_READERS:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if ENVIRONMENT_READERS & {alias.name for alias in node.names}:
                return True
    return False


def test_the_parser_sees_every_form_of_import() -> None:
    code = "def f():\n  from moed.moe.batch import x\nimport moed.server.api\nfrom moed import dist"
    assert imported_roots(code) == {"moe", "server", "dist"}


@pytest.mark.parametrize(
    "code", ["import os\nos.environ['X']", "import os\nos.getenv('X')", "from os import environ"]
)
def test_the_parser_sees_every_form_of_reading(code: str) -> None:
    assert reads_environment(code)
    assert not reads_environment("import os\nos.getpid()")


@pytest.mark.parametrize("root", FORBIDDEN)
def test_arrows_run_one_way(root: str) -> None:
    assert sources(root)
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in sources(root)
        if (bad := imported_roots(path.read_text()) & FORBIDDEN[root])
    }
    assert wrong == {}


def test_only_config_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for root in FORBIDDEN
        for path in sources(root)
        if reads_environment(path.read_text())
    }
    assert readers == {"config/environ.py"}


def test_no_import_is_relative() -> None:
    """`from . import x` would hide an arrow from the test above."""
    relative = [
        str(path.relative_to(ROOT))
        for root in FORBIDDEN
        for path in sources(root)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []
