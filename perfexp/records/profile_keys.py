"""Profile keys: points that hold a profile, and the timed points that they belong to.

A profiler slows calls down, so a profile is measured in a process of its own. Its point has the
timed point's key with the phase `train_profile` or `inference_profile`.
"""

from __future__ import annotations

import msgspec

from perfexp.records.record import Key

_PROFILE = "_profile"
#: Name of the NVTX range around a whole call, by its phase.
WHOLE = {"train": "train_step", "inference": "inference"}


def profile_key(key: Key) -> Key:
    """Return the profile's key for a timed point.

    The profile's point is stored under it.
    """
    return msgspec.structs.replace(key, phase=key.phase + _PROFILE)


def profiled_key(key: Key) -> Key:
    """Return the timed point's key for a profile.

    Reports label a profile by its timed point.
    """
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_PROFILE))


def is_profile(key: Key) -> bool:
    """Return whether a key belongs to a profile.

    Statistics and remaining times treat such points separately.
    """
    return key.phase.endswith(_PROFILE)
