"""A folder of images of your own: one subfolder for each class, of any name (or train/ and test/ with such subfolders).
Run it with: python own_image_folder.py"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import fedspd


def write_images(folder: Path) -> None:
    """0/0000.png, 1/0001.png, ...: the handwritten digits of scikit-learn, which are in the range 0 to 16."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number:04d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(path)


with TemporaryDirectory() as folder:
    write_images(Path(folder))
    config = {
        "clients": 8,
        "rounds": 10,
        "data": {"name": folder},
        "training": {"lr": 0.1, "batch": 20},
        "fedspd": {"warmup": 4},
    }
    result = fedspd.run(config)
print(f"Test accuracy, mean over {len(result.accuracy)} clients: {result.accuracy.mean():.1%}")
