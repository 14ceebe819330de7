"""Arrays of your own: a table of measurements and class labels, of which every client has mostly one class or the other.
Run it with: python own_arrays.py"""

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
result = fedspd.run(
    config, data=(x, y)
)  # a fifth becomes test data; or give (x_train, y_train, x_test, y_test)
print(f"Test accuracy by client: {' '.join(f'{score:.0%}' for score in result.accuracy)}")
print(f"Mean: {result.accuracy.mean():.1%}")
