"""Write the locks of the images: every package with its version and the hashes of its files.

    python docker/lock.py

It needs uv, and resolves what pyproject.toml and constraints.txt allow. The locks name no index: the builder's pip
decides where files come from, and refuses a file with another hash.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "docker" / "requirements"
#: Packages that come with the build of torch: another build has others.
_OF_TORCH = re.compile(r"(torch|torchvision|triton|nvidia-.+|cuda-.+)$")
_NOT_OF_TORCH = ("nvidia-ml-py",)
#: MLflow's client for nodes that only measure, and what a sqlite store needs.
_SKINNY = ("mlflow-skinny", "sqlalchemy", "alembic")
#: What source packages among the others are built with.
_BUILD = ("setuptools", "wheel")
#: MLflow's server with authentication and its driver of PostgreSQL.
_SERVER = ("mlflow[auth]", "psycopg[binary]")
_HEADER = "# Written by docker/lock.py; {about}.\n"


def main() -> None:
    """Write all locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = project["project"]["dependencies"]
    everything = _resolved([], ROOT / "pyproject.toml", "--extra=seg")
    pins = [
        line.rstrip(" \\")
        for text in everything.values()
        for line in text.splitlines()
        if line[0] != " "
    ]
    lean = [text for text in needed if not text.startswith("mlflow")] + list(_SKINNY)
    measure = _resolved([*lean], None, constraints=pins)
    tests = _resolved([], ROOT / "pyproject.toml", "--extra=dev", constraints=pins)
    build = _resolved([*project["build-system"]["requires"], *_BUILD], None, constraints=pins)
    server = _resolved(_SERVER, None, constraints=pins)
    of_torch = {name: lines for name, lines in everything.items() if _is_of_torch(name)}
    base = {name: lines for name, lines in everything.items() if name not in of_torch}
    _write("base.txt", base, "all but torch")
    _write("torch-cuda.txt", of_torch, "torch and CUDA's libraries")
    _write(
        "measure.txt",
        {n: x for n, x in measure.items() if n not in of_torch},
        "nodes that only measure",
    )
    _write(
        "test.txt", {n: x for n, x in tests.items() if n not in everything}, "tests, above base.txt"
    )
    _write("mlflow.txt", server, "MLflow's server")
    _write("build.txt", build, "building wheels")


def _resolved(
    requirements: Iterable[str],
    project: Path | None,
    *options: str,
    constraints: Iterable[str] = (),
) -> dict[str, str]:
    """The lines of each package by its name, with hashes, for Linux and every supported Python."""
    with tempfile.TemporaryDirectory() as folder:
        source, pins, lock = (Path(folder, name) for name in ("in.txt", "pins.txt", "out.txt"))
        source.write_text("\n".join(requirements))
        pins.write_text("\n".join(constraints))
        subprocess.run(
            [
                *(
                    "uv",
                    "pip",
                    "compile",
                    "--quiet",
                    "--universal",
                    "--python-version=3.11",
                    "--generate-hashes",
                ),
                *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
                *("-c", str(ROOT / "constraints.txt"), "-c", str(pins), "-o", str(lock), *options),
                str(project or source),
            ],
            cwd=ROOT,
            check=True,
        )
        blocks = re.split(r"\n(?=\S)", lock.read_text().strip())
    locked: dict[str, str] = {}
    for block in blocks:  # two of one package where Pythons have different versions
        name = re.split(r"[=\s\[]", block, maxsplit=1)[0]
        locked[name] = f"{locked[name]}\n{block}" if name in locked else block
    return locked


def _is_of_torch(name: str) -> bool:
    return name not in _NOT_OF_TORCH and _OF_TORCH.match(name) is not None


def _write(name: str, locked: dict[str, str], about: str) -> None:
    text = _HEADER.format(about=about) + "\n".join(locked[key] for key in sorted(locked)) + "\n"
    (LOCKS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
