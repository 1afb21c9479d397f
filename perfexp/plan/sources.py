"""Sources: hashes of the user's own code that a plan runs, found without importing any of it."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

#: Names of folders with installed packages, which their versions identify.
_INSTALLED = ("site-packages", "dist-packages")
#: Most files that are followed.
_MOST_FILES = 2000


def hashes(names: Iterable[str], files: Iterable[Path] = ()) -> dict[str, str]:
    """Return the SHA-256 of modules' files, of those that they import, and of other files, by path from `sys.path`.

    Of a dotted name (`package.module.Class`), the parts that are modules count. Only the user's files are followed:
    neither the standard library, nor installed packages, nor perfexp. Imports are read from the syntax, so that names
    that are computed while the code runs are not found.
    """
    found = {file.name: _hash(file) for file in files if file.suffix == ".py" and file.is_file()}
    waiting = sorted(names)
    while waiting and len(found) < _MOST_FILES:
        for name, file in _files(waiting.pop()):
            if name not in found:
                found[name] = _hash(file)
                waiting += _imports(file, name)
    return dict(sorted(found.items()))


def _files(dotted: str) -> Iterator[tuple[str, Path]]:
    """The user's files of the modules in a dotted name, each with its path from the folder that is searched."""
    places, parts = None, list[str]()
    for part in dotted.split("."):
        parts.append(part)
        spec = _spec(".".join(parts), places)
        if spec is None or (spec.origin and _is_foreign(Path(spec.origin))):
            return
        places = list(spec.submodule_search_locations or ())
        if spec.origin and spec.origin.endswith(".py"):
            name = "/".join([*parts, "__init__"] if places else parts)
            yield f"{name}.py", Path(spec.origin)
        if not places:
            return


def _spec(name: str, places: list[str] | None) -> ModuleSpec | None:
    """Where a module is, in these folders or on the search path; unlike importlib's, it imports no package above it."""
    for finder in sys.meta_path:
        try:
            if spec := finder.find_spec(name, places):
                return spec
        except KeyError:  # a package without __init__.py in another one, which is not imported
            spec = ModuleSpec(name, None, is_package=True)
            folders = (Path(place) / name.rpartition(".")[2] for place in places or ())
            spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
            return spec
        except (ImportError, AttributeError, ValueError, OSError):
            continue
    return None


def _is_foreign(file: Path) -> bool:
    """Whether a file belongs to Python, an installed package, or perfexp."""
    own = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    own += [Path(__file__).parents[1], Path(sys.prefix) / "lib"]
    return any(part in _INSTALLED for part in file.parts) or any(
        file.is_relative_to(folder) for folder in own
    )


def _imports(file: Path, name: str) -> Iterator[str]:
    """The dotted names that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _hash(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
