"""Learn the table of kernels that is shipped, on the first CUDA device, and the calls that the tests read.

    python tools/kernel_families.py [--seconds 300] [--out perfexp/convolution/families.json] [--seen FILE]

`perfexp calibrate kernels` learns the same for the device at hand. FILE gets the sets of names that were seen together
(tests/convolution/kernels_seen.json).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.convolution import calibration


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="begin no further convolution after this time"
    )
    parser.add_argument("--out", type=Path, default=Path("perfexp/convolution/families.json"))
    parser.add_argument("--seen", type=Path)
    settings = parser.parse_args()
    families, seen = calibration.learn(
        calibration.geometries(), torch.device("cuda"), settings.seconds, print
    )
    settings.out.write_bytes(msgspec.json.format(msgspec.json.encode(families), indent=1) + b"\n")
    if settings.seen:
        rows = [
            json.dumps({"which": which, "algorithm": name, "kernels": kernels, "calls": calls})
            for (which, name, kernels), calls in sorted(seen.items())
        ]
        settings.seen.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    print(families.seen)


if __name__ == "__main__":
    main()
