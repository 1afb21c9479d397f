"""Number formats for contractions: TF32 by torch's flags, or a precision's data type.

Contractions are matrix products and convolutions. Data sheets give a peak rate for each number
format, so rooflines and MFU need the format that ran. TF32 is NVIDIA's shortened float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: First major compute capability with TF32 on NVIDIA GPUs.
_FIRST_TF32 = 8
#: Data-sheet names of number formats, by torch name.
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Formats(NamedTuple):
    """Number formats for contractions, by data-sheet name: `fp32`, `tf32`, `fp16` or `bf16`.

    Attributes:
        products: format for matrix products.
        convolutions: format for convolutions, which have a TF32 flag of their own in torch.
    """

    products: str
    convolutions: str

    @classmethod
    def of(cls, data_type: str, tf32: bool | None, flags: tuple[bool, bool] | None) -> Formats:
        """Return a precision's number formats.

        Sessions report the formats that their calls use this way.

        Args:
            data_type: data type for contractions, by torch name: `float32`, `float16`, `bfloat16`.
            tf32: whether the precision sets TF32; None leaves torch's flags.
            flags: torch's flags for products and convolutions; None on a device without TF32.
        """
        name = _FORMATS[data_type]
        if name != "fp32" or tf32 is False or flags is None:
            return cls(name, name)
        return cls.of_flags(flags)

    @classmethod
    def of_flags(cls, flags: tuple[bool, bool]) -> Formats:
        """Return float32's number formats, given torch's flags for products and convolutions.

        Rooflines use it to choose ceilings for a record with `precision=torch`.
        """
        products, convolutions = ("tf32" if is_allowed else "fp32" for is_allowed in flags)
        return cls(products, convolutions)


def tf32_flags(environment: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Return whether float32 matrix products and convolutions may use TF32, as a pair.

    None if the run's device has no TF32, or if the environment does not say. The text for the
    precision and the ceilings of a roofline depend on it.

    Args:
        environment: a record's environment, with `device` and torch's flags in `session`.
    """
    device, session = environment.get("device"), environment.get("session")
    if not isinstance(device, Mapping) or not isinstance(session, Mapping):
        return None
    if device.get("kind") != "cuda" or device.get("rocm"):
        return None
    major = str(device.get("compute_capability") or "").partition(".")[0]
    if major.isdecimal() and int(major) < _FIRST_TF32:
        return None
    matmul, cudnn = session.get("matmul_allow_tf32"), session.get("cudnn_allow_tf32")
    if isinstance(matmul, bool) and isinstance(cudnn, bool):
        return matmul, cudnn
    return None
