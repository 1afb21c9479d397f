"""Facts of a GPU's data sheet, as the files of conf/gpu give them; what no sheet gives is None, never guessed."""

from __future__ import annotations

from dataclasses import dataclass, field


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
