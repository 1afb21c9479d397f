"""Number formats of contractions: TF32 by torch's flags, or the data type of a precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Major compute capability from which on NVIDIA's boards have TF32.
_FIRST_TF32 = 8
#: Names of number formats in data sheets by their names in torch.
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Formats(NamedTuple):
    """The number formats of contractions, by their names in data sheets: `fp32`, `tf32`, `fp16`, `bf16`."""

    products: str
    convolutions: str

    @classmethod
    def of(cls, data_type: str, tf32: bool | None, flags: tuple[bool, bool] | None) -> Formats:
        """Return those of a precision.

        Args:
            data_type: data type of contractions by its name in torch.
            tf32: whether the precision sets TF32; None leaves torch's flags.
            flags: these flags, for products and convolutions; None on a device without TF32.
        """
        name = _FORMATS[data_type]
        if name != "fp32" or tf32 is False or flags is None:
            return cls(name, name)
        return cls.of_flags(flags)

    @classmethod
    def of_flags(cls, flags: tuple[bool, bool]) -> Formats:
        """Return those of float32 by torch's flags for products and convolutions."""
        return cls(*("tf32" if is_allowed else "fp32" for is_allowed in flags))


def tf32_flags(environment: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Return whether matrix products and convolutions of float32 were allowed TF32; None where a device has none."""
    device, session = environment.get("device"), environment.get("session")
    if not isinstance(device, Mapping) or not isinstance(session, Mapping):
        return None
    matmul, cudnn = (session.get(f"{part}_allow_tf32") for part in ("matmul", "cudnn"))
    known = str(device.get("compute_capability") or "").partition(".")[0]
    has_none = (
        device.get("kind") != "cuda"
        or device.get("rocm")
        or (known.isdecimal() and int(known) < _FIRST_TF32)
    )
    return (
        (matmul, cudnn)
        if isinstance(matmul, bool) and isinstance(cudnn, bool) and not has_none
        else None
    )
