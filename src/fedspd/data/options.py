"""The options of the data: the dataset, and how it is partitioned among the clients."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fedspd.core.augmentation import Augmentation
from fedspd.core.options import Options, split_names

MixtureName = Literal[
    "rotation",
    "parity",
    "rotation+parity",
    "permutation",
    "colour",
    "pair",
    "dirichlet",
    "shards",
    "iid",
    "given",
]
ShareRule = Literal["uniform", "steps", "pure", "dirichlet"]

MIXTURES: dict[MixtureName, str] = {
    "rotation": "one distribution for each of `data.rotations`, by default images as they are and "
    "images rotated by 90 degrees",
    "parity": "two distributions, even labels and odd labels",
    "rotation+parity": "four distributions, even and odd labels, each plain and rotated",
    "permutation": "two or more distributions, true labels and permuted labels",
    "colour": "two to six distributions, colour images as they are and with permuted channels",
    "pair": "two distributions, this dataset and `data.second`, whose images are converted to the "
    "size and channels of the first",
    "dirichlet": "one label-skewed (non-IID) distribution, class proportions drawn from "
    "Dirichlet(alpha)",
    "shards": "one label-skewed (non-IID) distribution, examples sorted by label, cut into shards "
    "and assigned at random",
    "iid": "one distribution, partitioned at random",
    "given": "one distribution; every client has the examples that the data give it",
}


class DataOptions(Options):
    """The dataset, and how it is partitioned among the clients."""

    name: str = Field(
        "digits",
        description="A dataset from `fedspd data list`, an .npz, .csv or .parquet file, a folder, "
        "or `module:function`.",
    )
    inputs: Annotated[list[str] | None, BeforeValidator(split_names)] = Field(
        None,
        description="Only for tables and Hugging Face datasets: the columns of the inputs. The "
        "default is the column of images, or all columns that are not used otherwise.",
    )
    target: str | None = Field(
        None,
        description="Only for tables and Hugging Face datasets: the column of the labels or "
        "regression targets. The default is the one called label, labels, target, class or y.",
    )
    client: str | None = Field(
        None,
        description="Only for tables and Hugging Face datasets: the column that names the client "
        "of each example. The default is the one called client or client_id, if there is one.",
    )
    second: str | None = Field(None, description="Only for `pair`: the second dataset.")
    mixture: MixtureName | None = Field(
        None,
        description="; ".join(f"`{name}`: {text}" for name, text in MIXTURES.items())
        + ". The default is `given` for data with clients of their own, `pair` with a second "
        "dataset, `rotation` for square images, else `dirichlet`, or `iid` for a regression.",
    )
    scale: Literal["none", "standard"] = Field(
        "none",
        description="`standard` shifts and scales every input that is not an image to mean 0 and "
        "standard deviation 1, by each client's own training examples.",
    )
    augment: Annotated[list[Augmentation], BeforeValidator(split_names)] = Field(
        [],
        description="Random changes of training images, drawn for every local update: `crop` "
        "shifts an image by up to an eighth of its size, `flip` mirrors one in two.",
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
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="The share of every client's training examples that is set aside to choose the "
        "best round by their mean loss: the final phase starts from that round. At least one "
        "example of a client that has two. The default is none, and the last round counts.",
    )
    shares: ShareRule = Field(
        "uniform",
        description="A client's shares of the distributions: `uniform` draws its share of the "
        "first of two from 10 to 90 %; `steps` assigns 10, 30, 50, 70 and 90 % in turn; `pure` "
        "makes every client a member of one population; `dirichlet` draws the shares of all "
        "distributions from Dirichlet(1).",
    )
    populations: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="Only for shares = `pure`: the number of clients in each population. The "
        "default is as equal as possible. Newcomers (`holdout_clients`) do not count: they are "
        "assigned in the same proportions.",
    )
    imbalance: float = Field(
        1.0,
        ge=1,
        description="The ratio of training examples between the largest and the smallest third of "
        "the clients (r).",
    )
    distributions: int = Field(
        2, ge=1, description="Only for `permutation` and `colour`: the number of distributions."
    )
    rotations: list[int] | None = Field(
        None,
        description="Only for `rotation`: the angle of each distribution, in degrees: two or more "
        "of 0, 90, 180 and 270. The default is [0, 90].",
    )
    swap: int | None = Field(
        None,
        ge=2,
        description="Only for `permutation`: the number of classes that are permuted, at random. "
        "The default is all.",
    )
    alpha: float = Field(
        0.4,
        gt=0,
        description="Only for `dirichlet`: the concentration. A smaller one gives a client fewer "
        "classes.",
    )
    shards: int = Field(2, ge=1, description="Only for `shards`: the number of shards per client.")
