"""Train on your own folder of images: one subfolder per class, or train/ and test/ with these.

Run it with: python own_image_folder.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import fedspd


def write_images(folder: Path) -> None:
    """Write the digits of scikit-learn, with pixels from 0 to 16, as 0/0000.png and so on."""
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
    }
    result = fedspd.run(config)
print(f"Test accuracy, mean over {len(result.accuracy)} clients: {result.accuracy.mean():.1%}")
