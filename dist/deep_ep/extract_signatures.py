"""Write `signatures.json`: the calls of an installed `deep_ep`, read from its source.

Run by hand when the version in use changes:

    python -m moed.dist.deep_ep.extract_signatures FOLDER_OF_DEEP_EP

The source is parsed, never imported, since importing it needs a GPU's libraries.
"""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIGNATURES = Path(__file__).with_name("signatures.json")

# File in the package -> class -> the methods that moed calls or that a caller may hold it to.
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "buffers/legacy.py": {
        "Buffer": (
            "__init__",
            "destroy",
            "set_num_sms",
            "capture",
            "get_low_latency_rdma_size_hint",
            "get_dispatch_config",
            "get_combine_config",
            "get_dispatch_layout",
            "dispatch",
            "combine",
            "clean_low_latency_buffer",
            "low_latency_dispatch",
            "low_latency_combine",
            "get_next_low_latency_combine_buffer",
        )
    },
    "buffers/elastic.py": {
        "ElasticBuffer": (
            "__init__",
            "destroy",
            "capture",
            "get_buffer_size_hint",
            "dispatch",
            "combine",
        ),
        "EPHandle": ("__init__",),
    },
    "utils/event.py": {"EventOverlap": ("__init__", "current_stream_wait")},
}
MAIN = "__init__.py"
# `Config` is compiled, so its source is not in the package: this is its binding as published.
# Arguments of its two methods have no names there.
COMPILED: dict[str, dict[str, list[list[str | None]]]] = {
    "Config": {
        "__init__": [
            ["self", "positional or keyword", None],
            ["num_sms", "positional or keyword", "20"],
            ["num_max_nvl_chunked_send_tokens", "positional or keyword", "6"],
            ["num_max_nvl_chunked_recv_tokens", "positional or keyword", "256"],
            ["num_max_rdma_chunked_send_tokens", "positional or keyword", "6"],
            ["num_max_rdma_chunked_recv_tokens", "positional or keyword", "256"],
        ],
        "get_nvl_buffer_size_hint": [
            ["self", "positional-only", None],
            ["hidden_bytes", "positional-only", None],
            ["num_ranks", "positional-only", None],
        ],
        "get_rdma_buffer_size_hint": [
            ["self", "positional-only", None],
            ["hidden_bytes", "positional-only", None],
            ["num_ranks", "positional-only", None],
        ],
    }
}


def extract(package: Path) -> dict[str, Any]:
    """Everything that `signatures.json` holds, of the `deep_ep` in the folder `package`.

    Raises `LookupError` when a class or a method is not where it is expected.
    """
    sources = {name: (package / name).read_bytes() for name in (MAIN, *METHODS)}
    classes: dict[str, Any] = {}
    for name, methods_by_class in METHODS.items():
        tree = ast.parse(sources[name])
        for class_name, methods in methods_by_class.items():
            functions = functions_of(find_class(tree, class_name).body)
            classes[class_name] = {method: describe(functions[method]) for method in methods}
    for class_name, parameters_by_method in COMPILED.items():
        classes[class_name] = {
            method: {"is_static": False, "num_returned": None, "parameters": parameters}
            for method, parameters in parameters_by_method.items()
        }
    return {
        "version": _version(ast.parse(sources[MAIN])),
        "sha256": {name: hashlib.sha256(text).hexdigest() for name, text in sources.items()},
        "exports": sorted(_exports(ast.parse(sources[MAIN]))),
        "compiled": sorted(COMPILED),
        "classes": classes,
    }


def find_class(tree: ast.Module, name: str) -> ast.ClassDef:
    """Raises `LookupError` where there is none."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"no class {name}: this is not the package that was expected")


def functions_of(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    """By name; of overloads, the last, which is the function itself."""
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def describe(function: ast.FunctionDef) -> dict[str, Any]:
    """As the table has it: parameters, and how many values are returned."""
    decorators = [ast.unparse(node) for node in function.decorator_list]
    return {
        "is_static": "staticmethod" in decorators,
        "num_returned": _num_returned(function),
        "parameters": list(_parameters(function.args)),
    }


def _parameters(arguments: ast.arguments) -> Iterator[list[str | None]]:
    """[name, kind as `inspect` describes it, source of the default or None], in order."""
    positional = [
        *((node, "positional-only") for node in arguments.posonlyargs),
        *((node, "positional or keyword") for node in arguments.args),
    ]
    num_required = len(positional) - len(arguments.defaults)
    for index, (node, kind) in enumerate(positional):
        default = arguments.defaults[index - num_required] if index >= num_required else None
        yield [node.arg, kind, None if default is None else ast.unparse(default)]
    if arguments.vararg:
        yield [arguments.vararg.arg, "variadic positional", None]
    for node, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield [node.arg, "keyword-only", None if default is None else ast.unparse(default)]
    if arguments.kwarg:
        yield [arguments.kwarg.arg, "variadic keyword", None]


def _num_returned(function: ast.FunctionDef) -> int | None:
    """Length of the tuple that is returned; None where the source does not tell."""
    tuples = [node.value for node in _returns(function.body) if isinstance(node.value, ast.Tuple)]
    lengths = {len(node.elts) for node in tuples}
    return lengths.pop() if len(lengths) == 1 else None


def _returns(nodes: list[ast.stmt]) -> Iterator[ast.Return]:
    """The returns of a function, without those of functions defined in it."""
    for node in nodes:
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef):
            inner = ast.iter_child_nodes(node)
            yield from _returns([child for child in inner if isinstance(child, ast.stmt)])


def _version(tree: ast.Module) -> str:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise LookupError("no __version__")


def _exports(tree: ast.Module) -> Iterator[str]:
    """Names that the package's own imports bring in, once it is set up."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "deep_ep._C"):
            yield from (alias.asname or alias.name for alias in node.names)


def write(signatures: dict[str, Any], path: Path) -> None:
    """As JSON, with a parameter on one line."""
    text = json.dumps(signatures, indent=2)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n")


if __name__ == "__main__":
    write(extract(Path(sys.argv[1])), SIGNATURES)
