"""Every number of an event, as trackers of experiments take them."""

from fedspd.experiment.trackers import scalars


def test_lists_by_client_become_means_and_other_lists_one_number_each():
    event = {
        "event": "round",
        "round": 3,
        "lr": 0.1,
        "bytes": {"multicast": 4, "point_to_point": 8},
        "accuracy": [0.5, None, 1.0],
        "mixture": [[0.25, 0.75], [0.5, 0.5], [0.0, 1.0]],
        "consensus": [0.1, 0.2],
        "accuracy_by_class": [0.5, None, 1.0],  # as many classes as clients
        "validation_loss": [1.0, 2.0, 3.0],
        "privacy": {"epsilon": [1.0, 2.0, 3.0]},
        "purity": None,
        "alarms": ["one"],
        "traffic": [{"models": []}],
    }
    assert scalars(event) == {
        "lr": 0.1,
        "bytes/multicast": 4.0,
        "bytes/point_to_point": 8.0,
        "accuracy": 0.75,
        "mixture/0": 0.25,
        "mixture/1": 0.75,
        "consensus/0": 0.1,
        "consensus/1": 0.2,
        "accuracy_by_class/0": 0.5,
        "accuracy_by_class/2": 1.0,
        "validation_loss": 2.0,
        "privacy/epsilon": 2.0,
    }
