"""Train on your own arrays: here measurements with class labels, label-skewed across clients.

Run it with: python own_arrays.py
"""

from sklearn.datasets import load_breast_cancer

import fedspd

x, y = load_breast_cancer(return_X_y=True)
x = (x - x.mean(axis=0)) / x.std(axis=0)

config = {
    "clients": 8,
    "rounds": 10,
    "data": {"mixture": "dirichlet", "alpha": 0.5},
    "topology": {"kind": "ring"},
}
# A fifth becomes test data; or pass (x_train, y_train, x_test, y_test).
result = fedspd.run(config, data=(x, y))
print(f"Test accuracy by client: {' '.join(f'{score:.0%}' for score in result.accuracy)}")
print(f"Mean: {result.accuracy.mean():.1%}")
