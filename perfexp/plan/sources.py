"""Hash the user's own code that a plan uses, without importing it.

The hashes are part of the plan, so that no run mixes results of different code.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from perfexp.errors import is_own

#: Limit on the files that are hashed.
_MOST_FILES = 2000


def hashes(names: Iterable[str], files: Iterable[Path] = ()) -> dict[str, str]:
    """Return SHA-256 hashes by path from `sys.path`: module files, their imports, and other files.

    In a dotted name, for example `package.module.Class`, the modules count. Only the user's files
    are followed: not the standard library, installed packages, or perfexp. Imports are read from
    the syntax, so names computed at run time are not found.

    Args:
        names: dotted names, such as the plan's `_target_` values.
        files: further files; only `.py` files count.
    """
    hash_by_name = {
        file.name: _hash(file) for file in files if file.suffix == ".py" and file.is_file()
    }
    pending = sorted(names)
    while pending and len(hash_by_name) < _MOST_FILES:
        for name, file in _files(pending.pop()):
            if name not in hash_by_name:
                hash_by_name[name] = _hash(file)
                pending += _imports(file, name)
    return dict(sorted(hash_by_name.items()))


def _files(dotted: str) -> Iterator[tuple[str, Path]]:
    """Yield the user's module files in a dotted name: path from the searched folder, and file."""
    places = None
    parts: list[str] = []
    for part in dotted.split("."):
        parts.append(part)
        spec = _spec(".".join(parts), places)
        if spec is None or (spec.origin and not is_own(Path(spec.origin))):
            return
        places = list(spec.submodule_search_locations or ())
        if spec.origin and spec.origin.endswith(".py"):
            name = "/".join([*parts, "__init__"] if places else parts)
            yield f"{name}.py", Path(spec.origin)
        if not places:
            return


def _spec(name: str, places: list[str] | None) -> ModuleSpec | None:
    """Return a module's spec, from these folders or, for None, the search path.

    Unlike importlib, this does not import the packages above it. None if there is no such module.
    """
    for finder in sys.meta_path:
        try:
            if spec := finder.find_spec(name, places):
                return spec
        except KeyError:  # a package without __init__.py in another one, which is not imported
            spec = ModuleSpec(name, None, is_package=True)
            folders = (Path(path) / name.rpartition(".")[2] for path in places or ())
            spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
            return spec
        except (ImportError, AttributeError, ValueError, OSError):
            continue
    return None


def _imports(file: Path, name: str) -> Iterator[str]:
    """Yield the dotted names that a file imports; none if it cannot be parsed.

    Args:
        name: the file's path from the searched folder, which relative imports start from.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(filter(None, [*base, node.module]))
            for alias in node.names:
                yield f"{module}.{alias.name}"


def _hash(file: Path) -> str:
    """Return a file's SHA-256; empty if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
