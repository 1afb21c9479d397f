from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_sample_images


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real photographs, a temple and a flower, cut into six pictures each: two classes."""
    root = tmp_path_factory.mktemp("photographs")
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (root / name).mkdir()
        photograph = Image.fromarray(pixels)
        for number in range(6):
            left, top = 200 * (number % 3), 200 * (number // 3)
            photograph.crop((left, top, left + 200, top + 200)).save(root / name / f"{number}.jpg")
    return root
