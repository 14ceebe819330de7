"""Train on text: bags of words, or numbers of words for a small model with an embedding.

Each client is a person who writes about a few subjects. Run it with: python own_text.py
"""

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor, nn

import fedspd

SUBJECTS = {
    "food": "bread cheese soup apple bake pepper dinner cook",
    "sport": "goal team match run win score coach ball",
    "music": "song violin choir melody concert drum sing tune",
}
COMMON = ["the", "a", "we", "today", "with", "and", "very", "new", "old", "good", "day", "long"]
LENGTH = 8  # words of a message


class MeanOfWords(nn.Module):
    """The mean of the words' embeddings, then one dense layer."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 8)
        self.dense = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.embedding(x.long()).mean(1))


def write(random: np.random.Generator, subject: str) -> str:
    words = random.choice(SUBJECTS[subject].split(), 3), random.choice(COMMON, LENGTH - 3)
    return " ".join(np.concatenate(words))


random = np.random.default_rng(0)
people = {}
for person in ("Ada", "Ben", "Cleo", "Dan"):
    taste = random.dirichlet([1.0] * len(SUBJECTS))
    subjects = random.choice(list(SUBJECTS), 60, p=taste)
    people[person] = [write(random, subject) for subject in subjects], subjects

words = CountVectorizer().fit(text for texts, _ in people.values() for text in texts)
config = {"method": "fedavg", "rounds": 10, "training": {"lr": 0.5, "batch": 10}}

bags = {name: (words.transform(texts), subjects) for name, (texts, subjects) in people.items()}
result = fedspd.run({**config, "model": {"name": "linear"}}, data=bags)
print(f"Bags of words: {result.accuracy.mean():.1%}, classes {', '.join(result.classes)}")

split = words.build_analyzer()
size = len(words.vocabulary_) + 1  # 0 stands for no word


def number(text: str) -> list[int]:
    """Return the number of each word, as many as a message can have."""
    return ([words.vocabulary_[word] + 1 for word in split(text)] + [0] * LENGTH)[:LENGTH]


numbers = {
    name: ([number(t) for t in texts], subjects) for name, (texts, subjects) in people.items()
}
result = fedspd.run(config, data=numbers, model=lambda shape, classes: MeanOfWords(size, classes))
print(f"Embeddings: {result.accuracy.mean():.1%}")
