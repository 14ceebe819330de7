"""Train on your own .npz file, with the arrays x and y, or x_train, y_train, x_test and y_test.

Run it with: python own_npz.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.datasets import load_digits

import fedspd

digits = load_digits()
with TemporaryDirectory() as folder:
    path = Path(folder) / "digits.npz"
    pixels = (digits.images * 15).astype(np.uint8)  # integers from 0 to 255 are images
    np.savez(path, x=pixels, y=digits.target)

    config = {
        "clients": 8,
        "rounds": 10,
        "data": {"name": str(path)},
        "training": {"lr": 0.1, "batch": 20},
    }
    result = fedspd.run(config)
print(f"Test accuracy, mean over {len(result.accuracy)} clients: {result.accuracy.mean():.1%}")
