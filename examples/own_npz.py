"""An .npz file of your own, as numpy.savez writes it, with the arrays x and y (or x_train, y_train, x_test, y_test).
Run it with: python own_npz.py"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.datasets import load_digits

import fedspd

digits = load_digits()
with TemporaryDirectory() as folder:
    path = Path(folder) / "digits.npz"
    np.savez(
        path, x=(digits.images * 15).astype(np.uint8), y=digits.target
    )  # whole numbers from 0 to 255 are images

    config = {
        "clients": 8,
        "rounds": 10,
        "data": {"name": str(path)},
        "training": {"lr": 0.1, "batch": 20},
        "fedspd": {"warmup": 4},
    }
    result = fedspd.run(config)
print(f"Test accuracy, mean over {len(result.accuracy)} clients: {result.accuracy.mean():.1%}")
