"""GPU data sheets: facts from the files in conf/gpu, such as peak FLOP rates.

Rooflines, utilization and predictions compare measurements with them. A fact that no sheet gives is
None, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from perfexp.errors import UserError

#: The safe loader; ten times as fast where yaml has its C library.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(kw_only=True)
class GpuFacts:
    """Data-sheet figures of one GPU, dense (without structured sparsity).

    Peak FLOP rates are by number format, such as `fp16` or `tf32`; None means unknown. The keys
    `gpu.facts.…` in `plan/key_descriptions.yaml` describe each fact.
    """

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
        """Return the facts in the `facts` mapping of a file or a plan.

        Unknown names are ignored, and anything but a mapping gives no facts.
        """
        if not isinstance(node, Mapping):
            return cls()
        names = node.keys() & cls.__dataclass_fields__.keys()
        return cls(**{name: node[name] for name in names if node[name] is not None})


@dataclass(frozen=True, kw_only=True)
class GpuFile:
    """A file in conf/gpu.

    Attributes:
        match: case-insensitive pattern for device names; None matches any device.
        facts: facts from its data sheet.
    """

    match: str | None
    facts: GpuFacts

    def is_of(self, product: str) -> bool:
        """Return whether the file describes the device with this product name."""
        return self.match is None or re.search(self.match, product, re.IGNORECASE) is not None


def read(folders: Iterable[Path]) -> dict[str, GpuFile]:
    """Return the files `gpu/*.yaml` of configuration folders, by name without the ending.

    If several folders have a name, the last one counts. Plans, the doctor and rooflines read conf/
    and the user's own folders.

    Raises:
        UserError: a file is invalid.
    """
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
    """Return the name of the only file that matches a device's product name.

    None means that no file, or more than one, matches. A file without a pattern never does. With
    gpu=auto it finds the data sheet of the detected GPU.
    """
    names = [name for name, file in files.items() if product and file.match and file.is_of(product)]
    if len(names) == 1:
        return names[0]
    return None
