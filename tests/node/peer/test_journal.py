"""The journal of a peer that stops and starts again."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from chaos.plant import (
    Plant,
    build_config,
    run_all,
    wait_for_round,
)
from chaos.virtual_time import run_instantly
from fedspd.core.errors import RejectedError, StorageError
from fedspd.node.peer.journal import Journal
from fedspd.node.wire.messages import JOINING, Request


def test_peer_does_not_share_untrained_models_while_it_reads_its_journal(tmp_path: Path) -> None:
    """Neighbours ask from the moment that the peer listens."""
    plant = Plant(build_config("fedavg"), tmp_path)
    runner = plant.build(0).runner
    with pytest.raises(StorageError, match="has 0 of 1 clients"):
        runner.load(tmp_path)  # there is no checkpoint, so it ends in the middle
    assert runner.state is None
    request = Request(0, JOINING, (0,), runner.plan.learner.size)
    with pytest.raises(RejectedError, match="has not begun yet"):
        plant.peers[0].protocol.handle_request("n1", request)


def test_leaving_peer_commits_its_round_and_continues_at_the_next_start(tmp_path: Path) -> None:
    plant = Plant(build_config("fedavg", rounds=12), tmp_path)

    async def leave_early() -> None:
        tasks = [asyncio.create_task(plant.run(i)) for i in range(5)]
        await wait_for_round(plant, 0, 4)
        for peer in plant.peers.values():
            peer.leave()
        await asyncio.gather(*tasks)

    run_instantly(leave_early())
    done = [plant.rounds(i) for i in range(5)]
    for peer in plant.peers.values():
        peer.journal.close()
    assert all(4 <= max(rounds) < 12 for rounds in done)
    run_instantly(run_all(plant))
    assert all(plant.rounds(i)[: len(done[i])] == done[i] for i in range(5))
    assert all(plant.rounds(i)[-1] == 12 for i in range(5))


def test_journal_refuses_a_folder_of_another_agreement(tmp_path: Path) -> None:
    Journal(tmp_path / "x", {"network": "a", "node": "n0", "agreement": "1"}).close()
    with pytest.raises(StorageError, match="belongs to another agreement"):
        Journal(tmp_path / "x", {"network": "a", "node": "n0", "agreement": "2"})


@pytest.mark.parametrize(
    ("kept", "factor"), [(10, 1.0), (None, 2.0)], ids=["fewer examples", "other examples"]
)
def test_journal_refuses_data_that_changed_since_the_last_round(
    kept: int | None, factor: float, tmp_path: Path
) -> None:
    plant = Plant(build_config(rounds=1), tmp_path)
    run_instantly(run_all(plant))
    plant.peers[0].journal.close()
    peer = plant.build(0)
    train = peer.runner.plan.train
    then, now = len(train.y[0]), len(train.y[0][:kept])
    changed = dataclasses.replace(train, x=[train.x[0][:kept] * factor], y=[train.y[0][:kept]])
    peer.runner.plan = dataclasses.replace(peer.runner.plan, train=changed)
    sentence = rf"have changed since the last round \({then} examples then, {now} now\)"
    with pytest.raises(StorageError, match=sentence):
        run_instantly(peer.run())


def test_journal_forgets_a_round_without_its_checkpoint(tmp_path: Path) -> None:
    """As kill -9 leaves it between the event and the checkpoint."""
    plant = Plant(build_config("fedavg", rounds=1), tmp_path)
    run_instantly(run_all(plant))
    journal, before = plant.peers[0].journal, plant.events(0)
    journal.run_folder.append({**before[0], "round": 3}, is_sealed=True)
    journal.restore(plant.peers[0].runner, is_newcomer=False)
    assert plant.events(0) == before
    assert journal.last == before[-1]


def test_damaged_journal_stops_the_peer_and_stays_as_it_is(tmp_path: Path) -> None:
    plant = Plant(build_config("fedavg", rounds=1), tmp_path)
    run_instantly(run_all(plant))
    part = max((tmp_path / "n0" / "checkpoints").rglob("*.safetensors"))
    content = part.read_bytes()
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    part.write_bytes(damaged)
    plant.peers[0].journal.close()
    with pytest.raises(StorageError, match=r"missing or damaged; .* node rollback --to 1'"):
        run_instantly(plant.run(0))
    assert part.read_bytes() == damaged
    plant.peers[0].journal.roll_back(1)  # as the error says
    plant.peers[0].journal.close()
    run_instantly(plant.run(0))
    assert plant.has_finished(0)
