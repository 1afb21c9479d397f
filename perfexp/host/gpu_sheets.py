"""GPU data sheets: the facts in the files of conf/gpu; a fact that no sheet gives is None, never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from perfexp.errors import UserError

#: Safe, and ten times as fast as its twin where yaml has its C library.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(kw_only=True)
class GpuFacts:
    """Data-sheet figures of one device, dense (without structured sparsity)."""

    product: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    peak_flops_per_second: dict[str, float | None] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_bytes_per_second: float | None = None
    power_watts: float | None = None
    sources: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_node(cls, node: object) -> GpuFacts:
        """Return the facts of a `facts` mapping; unknown names are ignored, and other types give no facts."""
        items = node.items() if isinstance(node, Mapping) else ()
        return cls(
            **{
                name: value
                for name, value in items
                if name in cls.__dataclass_fields__ and value is not None
            }
        )


@dataclass(frozen=True, kw_only=True)
class GpuFile:
    """A file of conf/gpu, with a case-insensitive pattern of device names (None for any) and the facts of its sheet."""

    match: str | None
    facts: GpuFacts

    def is_of(self, product: str) -> bool:
        """Whether the file is for the device with this name."""
        return self.match is None or re.search(self.match, product, re.IGNORECASE) is not None


def read(folders: Iterable[Path]) -> dict[str, GpuFile]:
    """Return the files of the gpu group by name, the last of several with one name; `UserError` for an invalid file."""
    files: dict[str, GpuFile] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("gpu/*.yaml"))):
        try:
            node = yaml.load(file.read_text(encoding="utf-8"), _LOADER) or {}
            re.compile(node.get("match") or "")
            files[file.stem] = GpuFile(
                match=node.get("match"), facts=GpuFacts.of_node(node.get("facts"))
            )
        except (OSError, yaml.YAMLError, re.error, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{file} cannot be read as a description of a GPU: {error}") from error
    return files


def matching(files: Mapping[str, GpuFile], product: str) -> str | None:
    """Return the name of the one file for a device with this name; None if there is none, or several."""
    names = [name for name, file in files.items() if product and file.match and file.is_of(product)]
    return names[0] if len(names) == 1 else None
