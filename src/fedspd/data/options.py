"""The options of the data: the dataset, and how it is partitioned among the clients."""

from typing import Literal

from pydantic import Field

from fedspd.core.options import Options

MixtureName = Literal[
    "rotation", "parity", "rotation+parity", "permutation", "pair", "dirichlet", "shards", "iid"
]
ShareRule = Literal["uniform", "steps"]

MIXTURES: dict[MixtureName, str] = {
    "rotation": "two distributions, images as they are and images rotated by 90 degrees",
    "parity": "two distributions, even labels and odd labels",
    "rotation+parity": "four distributions, even and odd labels, each plain and rotated",
    "permutation": "two or more distributions, true labels and permuted labels",
    "pair": "two distributions, this dataset and `data.second`, whose images are converted to the "
    "size and channels of the first",
    "dirichlet": "one label-skewed (non-IID) distribution, class proportions drawn from "
    "Dirichlet(alpha)",
    "shards": "one label-skewed (non-IID) distribution, examples sorted by label, cut into shards "
    "and assigned at random",
    "iid": "one distribution, partitioned at random",
}


class DataOptions(Options):
    """The dataset, and how it is partitioned among the clients."""

    name: str = Field(
        "digits",
        description="A dataset from `fedspd data list`, an .npz file, a folder of images, or "
        "`module:function`.",
    )
    second: str | None = Field(None, description="Only for `pair`: the second dataset.")
    mixture: MixtureName = Field(
        "rotation",
        description="; ".join(f"`{name}`: {text}" for name, text in MIXTURES.items()) + ".",
    )
    examples: int | None = Field(
        None,
        ge=2,
        description="The average number of training examples per client. The default is 80 % of "
        "an even share, at most 300.",
    )
    test_examples: int | None = Field(
        None,
        ge=1,
        description="The number of test examples per client. The default is in proportion to the "
        "dataset's training and test parts.",
    )
    shares: ShareRule = Field(
        "uniform",
        description="A client's share of the first distribution: `uniform` draws it from 10 to "
        "90 %; `steps` assigns 10, 30, 50, 70 and 90 % in turn.",
    )
    imbalance: float = Field(
        1.0,
        ge=1,
        description="The ratio of training examples between the largest and the smallest third of "
        "the clients (r).",
    )
    distributions: int = Field(
        2, ge=1, description="Only for `permutation`: the number of distributions."
    )
    alpha: float = Field(
        0.4,
        gt=0,
        description="Only for `dirichlet`: the concentration. A smaller one gives a client fewer "
        "classes.",
    )
    shards: int = Field(2, ge=1, description="Only for `shards`: the number of shards per client.")
