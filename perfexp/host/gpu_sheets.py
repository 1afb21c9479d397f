"""Facts of a GPU's data sheet, as the files of conf/gpu give them; what no sheet gives is None, never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from perfexp.errors import UserError


@dataclass(kw_only=True)
class GpuFacts:
    """A data sheet's figures of one device, dense (without structured sparsity).

    Attributes:
        product: full name.
        architecture: family name.
        compute_capability: NVIDIA's number, or AMD's gfx name.
        peak_flops_per_second: by data type (`fp32`, `tf32`, `fp16`, …); operations per second for integers.
        memory_bytes: as sold; the driver's own figure differs a little.
        memory_bytes_per_second: peak bandwidth of the device's memory.
        power_watts: limit of the board.
        sources: documents and what each of them gives.
        notes: variants, divided-out factors, what is doubtful.
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
        """Facts from the `facts` of a file or of a plan; what it does not know is ignored.

        Args:
            node: a mapping; anything else gives no facts.
        """
        known = node.items() if isinstance(node, Mapping) else ()
        return cls(**{name: value for name, value in known if name in cls.__dataclass_fields__ and value is not None})


@dataclass(frozen=True, kw_only=True)
class GpuFile:
    """A file of conf/gpu.

    Attributes:
        match: regular expression, searched in the name that a driver reports whatever the case of its letters;
            None where any name will do.
        facts: figures of the data sheet; without sources where there is no sheet.
    """

    match: str | None
    facts: GpuFacts

    def is_of(self, product: str) -> bool:
        """Whether the file is for a device.

        Args:
            product: name that the driver reports.
        """
        return self.match is None or re.search(self.match, product, re.IGNORECASE) is not None


def read(folders: Iterable[Path]) -> dict[str, GpuFile]:
    """The files of the gpu group by name; a file of a later folder replaces one of an earlier folder.

    Args:
        folders: configuration folders with a group `gpu`.

    Raises:
        UserError: a file is no YAML, or its `match` is no regular expression.
    """
    found: dict[str, GpuFile] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("gpu/*.yaml"))):
        try:
            node = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            re.compile(node.get("match") or "")
            found[file.stem] = GpuFile(match=node.get("match"), facts=GpuFacts.of_node(node.get("facts")))
        except (OSError, yaml.YAMLError, re.error, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{file} can't be read as a description of a GPU: {error}") from error
    return found


def matching(files: Mapping[str, GpuFile], product: str) -> str | None:
    """The name of the one file that is for a device; None where none is, or several are.

    Args:
        files: those of the gpu group.
        product: name that the driver reports; empty where it is not known.
    """
    found = [name for name, file in files.items() if product and file.match and file.is_of(product)]
    return found[0] if len(found) == 1 else None
