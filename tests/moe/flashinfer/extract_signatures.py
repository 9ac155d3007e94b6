"""Write `signatures.json`: the calls of FlashInfer that moed makes, read from its wheel.

Run by hand when the version in use changes:

    python -m tests.moe.flashinfer.extract_signatures FLASHINFER_WHEEL

The sources are parsed, never imported, since importing them needs a GPU's libraries.
"""

import ast
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

from moed.dist.deep_ep.extract_signatures import describe, find_class, functions_of, write

SIGNATURES = Path(__file__).with_name("signatures.json")

# `plan` of the decode wrapper hands its keywords on to `_plan_impl`.
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "flashinfer/prefill.py": {"BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run")},
    "flashinfer/decode.py": {
        "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "_plan_impl", "run")
    },
}
MAIN = "flashinfer/__init__.py"


def extract(wheel: Path) -> dict[str, Any]:
    """Everything that `signatures.json` holds."""
    classes: dict[str, Any] = {}
    hashes = {}
    with zipfile.ZipFile(wheel) as archive:
        exported = exports(ast.parse(archive.read(MAIN)))
        for file, methods_by_class in METHODS.items():
            source = archive.read(file)
            hashes[file] = hashlib.sha256(source).hexdigest()
            tree = ast.parse(source)
            for name, methods in methods_by_class.items():
                assert name in exported, name
                functions = functions_of(find_class(tree, name).body)
                classes[name] = {
                    method: describe(functions[method])["parameters"] for method in methods
                }
    return {"version": wheel.name.split("-")[1], "sha256": hashes, "classes": classes}


def exports(tree: ast.Module) -> set[str]:
    """Names that the package itself offers."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


if __name__ == "__main__":
    write(extract(Path(sys.argv[1])), SIGNATURES)
