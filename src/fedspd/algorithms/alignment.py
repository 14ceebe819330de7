"""Alignment of cluster labels: two clients may mean different clusters by the same label.

Labels spread from client 0, so that two neighbours never swap towards each other. A client follows
the neighbours whose note is lower than its own. A note is one number for the pair (lowest id whose
labels are followed, hops to it). After as many alignments as the graph has hops, all clients use
the labels of client 0.

Shapes: C clients, S clusters, W trained parameters of a model.
"""

import torch
from torch import Tensor

from fedspd.core.exchange import Neighbourhood, ReceivedModel
from fedspd.core.metrics import best_matching


def first_notes(clients: Tensor, network_size: int) -> Tensor:
    """Return the notes of clients that follow themselves, from no hop away."""
    return clients * (network_size + 1)


def new_labels(
    centers_CSW: Tensor, note_C: Tensor, neighbourhood: Neighbourhood
) -> tuple[Tensor, Tensor]:
    """Return label_CS, the new label of each cluster of each client, and the new notes."""
    C, S, _ = centers_CSW.shape
    label_CS, note_C = torch.arange(S).repeat(C, 1), note_C.clone()
    for c in range(C):
        received = list(neighbourhood.received(c))
        lowest = min((other.note for other in received), default=int(note_C[c]))
        if lowest < note_C[c]:
            followed = [other for other in received if other.note == lowest]
            label_CS[c] = match_labels(centers_CSW[c], followed)
            note_C[c] = lowest + 1
    return label_CS, note_C


def match_labels(centers_SW: Tensor, received: list[ReceivedModel]) -> Tensor:
    """Return label_S: each center takes the label of the received models that it resembles most.

    Resemblance is cosine similarity, and the matching is an optimal assignment. A center that is
    not matched keeps its label if nothing was received under it, or takes a free one.
    """
    S, W = centers_SW.shape
    labels = sorted({other.cluster for other in received})
    means = [
        torch.stack([other.model_P[:W] for other in received if other.cluster == s]).mean(0)
        for s in labels
    ]
    similarity = torch.nn.functional.cosine_similarity(
        torch.stack(means)[:, None], centers_SW[None], dim=2
    )
    score = similarity.double().nan_to_num(-1.0).cpu().numpy()
    rows, columns = best_matching(score)
    label = {int(column): labels[row] for row, column in zip(rows, columns, strict=True)}
    unmatched, free = set(range(S)) - set(label), set(range(S)) - set(label.values())
    label |= {s: s for s in unmatched & free}
    label |= zip(sorted(unmatched - free), sorted(free - unmatched), strict=True)
    return torch.tensor([label[s] for s in range(S)])
