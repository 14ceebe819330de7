"""Label switching: two clients may mean different clusters by the same label.

Labels spread from client 0, so that two neighbours never swap towards each other: a client follows the neighbours whose
note is lower than its own, a note being (the lowest id whose labels are followed, hops to it) in one number. After as
many alignments as the graph has hops, all use the labels of client 0.

Shapes: C clients, S clusters, W weights of a model.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedspd.core.exchange import Neighbourhood, ReceivedModel


def first_notes(clients: Tensor, network: int) -> Tensor:
    """Everybody follows itself, from no hop away."""
    return clients * (network + 1)


def new_labels(
    centers_CSW: Tensor, note_C: Tensor, neighbourhood: Neighbourhood
) -> tuple[Tensor, Tensor]:
    """label_CS, the new label of each cluster of each client, and the new notes."""
    C, S, _ = centers_CSW.shape
    label_CS, note_C = torch.arange(S).repeat(C, 1), note_C.clone()
    for c in range(C):
        heard = list(neighbourhood.received(c))
        lowest = min((other.note for other in heard), default=int(note_C[c]))
        if lowest < note_C[c]:
            label_CS[c] = matched(
                centers_CSW[c], [other for other in heard if other.note == lowest]
            )
            note_C[c] = lowest + 1
    return label_CS, note_C


def matched(centers_SW: Tensor, heard: list[ReceivedModel]) -> Tensor:
    """label_S: each own center takes the label of the heard models that it resembles most (cosine, optimal assignment)."""
    S, W = centers_SW.shape
    labels = sorted({other.cluster for other in heard})
    means = torch.stack(
        [
            torch.stack([other.model_P[:W] for other in heard if other.cluster == s]).mean(0)
            for s in labels
        ]
    )
    likeness = torch.nn.functional.cosine_similarity(means[:, None], centers_SW[None], dim=2)
    rows, columns = linear_sum_assignment(
        likeness.double().nan_to_num(-1.0).cpu().numpy(), maximize=True
    )
    label = {int(column): labels[row] for row, column in zip(rows, columns, strict=True)}
    unheard = [s for s in range(S) if s not in label.values()]
    unmatched = [s for s in range(S) if s not in label]
    stay = [
        s for s in unmatched if s in unheard
    ]  # nothing was heard of this label: the center keeps it
    label |= {s: s for s in stay}
    label |= dict(
        zip(
            [s for s in unmatched if s not in stay],
            [s for s in unheard if s not in stay],
            strict=True,
        )
    )
    return torch.tensor([label[s] for s in range(S)])
