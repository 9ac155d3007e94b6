"""Every folder with code is in the wheel: a missing one works in an editable install only."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOTS = ("server", "moe", "dist", "config")


def pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_code_is_listed_in_packages() -> None:
    folders = {
        path.parent.relative_to(ROOT) for root in ROOTS for path in (ROOT / root).rglob("*.py")
    }
    found = {".".join(("moed", *folder.parts)) for folder in folders}
    setuptools = pyproject()["tool"]["setuptools"]  # type: ignore[index]
    listed = setuptools["packages"]
    assert sorted(listed) == sorted(found)
    assert setuptools["package-dir"] == {f"moed.{root}": root for root in ROOTS}


def test_every_root_says_that_it_is_typed() -> None:
    assert all((ROOT / root / "py.typed").is_file() for root in ROOTS)


def test_no_folder_hides_the_namespace_package() -> None:
    assert not (ROOT / "moed").exists()


def test_the_source_folder_dist_is_not_ignored() -> None:
    lines = (ROOT / ".gitignore").read_text().split()
    assert "!/dist/" in lines
    assert not {"dist", "dist/", "/dist", "/dist/"} & set(lines)
