"""Train on data that come with clients: here a table with a column that names each example's.

The same table as a CSV or Parquet file is data.name = "table.csv". Run it with:
python own_clients.py
"""

import numpy as np
from sklearn.datasets import load_wine

import fedspd

wine = load_wine(as_frame=True).frame
wine["target"] = np.array(["Barolo", "Grignolino", "Barbera"])[wine["target"]]
wine["cellar"] = [f"cellar {number}" for number in np.arange(len(wine)) * 7 % 6]

config = {
    "method": "fedavg",
    "rounds": 20,
    # Alcohol is near 13, proline near 700: each cellar scales its inputs by its own examples.
    "data": {"client": "cellar", "scale": "standard"},
    "training": {"batch": 5},
}
result = fedspd.run(config, data=wine)  # a fifth of each cellar's examples becomes test data
names = [client["name"] for client in result.experiment.federation.description["clients"]]
for name, score in zip(names, result.accuracy, strict=True):
    print(f"{name}: {score:.0%}")
print(f"Mean: {result.accuracy.mean():.1%}")

first = wine.drop(columns=["target", "cellar"]).head(1)
best = int(result.predict(0, first).argmax())
print(f"The first wine is a {result.classes[best]}.")
