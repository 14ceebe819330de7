"""The privacy of one node: its ledger, in its journal, and the secret of its noise.

A release is written into the ledger before anything of it is sent. Its noise follows from a secret
of the node, its data, and the state that the round starts from. A node that is killed and repeats a
round from the same state makes the same release again, which costs nothing; from another state it
draws other noise, and pays.
"""

import hashlib
import logging
import os
import secrets
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedspd.core.errors import RejectedError, StorageError
from fedspd.core.exchange import Exchange
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.mechanism import Release
from fedspd.node.peer.journal import Journal, fingerprint
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.budget import AnyMechanism, Budget
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json

log = logging.getLogger("fedspd.node")

LEDGER, SECRET = "privacy.json", "privacy.key"  # in the journal
SECRET_BYTES = 32


class NodePrivacy:
    """What this node has released of its examples, and which neighbour knows of how much."""

    def __init__(self, journal: Journal, runner: BlockRunner, budget: Budget) -> None:
        self.journal, self.runner, self.budget = journal, runner, budget
        self.client = int(runner.plan.train.clients[0])
        mechanism = runner.plan.learner.mechanism
        assert isinstance(mechanism, AnyMechanism)
        self.mechanism = mechanism
        data = fingerprint(runner.plan.train)
        self.ledger: Json = self._open(data)
        self.shared: tuple[Tensor, Tensor] | None = None  # what newcomers may have
        self._secret = _read_secret(journal.run_folder.folder / SECRET)
        self._context = hashlib.sha256(data["sha256"].encode()).digest()
        self._round_id = ""
        self._use_secret("start")

    def _open(self, data: Json) -> Json:
        """Return the ledger of the journal, or a new one; never forget what was spent."""
        folder = self.journal.run_folder
        if not (folder.folder / LEDGER).exists():
            if folder.latest() is not None:
                raise StorageError(
                    f"'{folder.folder}': {LEDGER} is missing, the ledger of what this node has "
                    "released; expected it beside its rounds. Restore it from a copy."
                )
            new = {"data": data, "releases": [], "received": {}, "sendable": 0, "silent": False}
            folder.write(LEDGER, new)
            return new
        ledger = folder.read(LEDGER)
        if ledger["data"] != data:
            raise StorageError(
                f"--data: the training data have changed since this node first released something "
                f"({ledger['data']['examples']} examples then, {data['examples']} now); expected "
                "the same data. Give them, or start in another folder with --state."
            )
        return ledger

    def _use_secret(self, name: str) -> None:
        whole = self._secret + self._context + name.encode()
        self.mechanism.source.secret = hashlib.sha256(whole).digest()

    def _write(self) -> None:
        self.journal.run_folder.write(LEDGER, self.ledger)

    # ---- a round

    def begin_round(self, round: int) -> None:
        """Choose the noise of a round, by the state that it starts from."""
        self._round_id = f"{round}-{self.runner.digests()[0]}"
        self._use_secret(self._round_id)

    def pay(self, round: int, part: str = "") -> None:
        """Write what was released since the last call, before it is sent.

        Releases beyond the budget make the node silent: what it trains from now on stays at home.
        """
        spent = self.runner.take_releases().get(self.client, [])
        name = self._round_id + part
        known = {release["id"] for release in self.ledger["releases"]}
        if not spent or name in known:
            return
        entry = {"id": name, "round": round, "spent": [list(release) for release in spent]}
        self.ledger["releases"].append(entry)
        limit, count = self.budget.limit, len(self.ledger["releases"])
        if not self.ledger["silent"] and limit is not None and self.epsilon(count) > limit:
            self.ledger["silent"] = True
            log.warning(
                "privacy budget spent: round=%d epsilon=%g spent=%.4g; this node sends nothing "
                "more, and goes on listening",
                round,
                limit,
                self.epsilon(self.ledger["sendable"]),
            )
        if not self.ledger["silent"]:
            self.ledger["sendable"] = count
        self._write()

    def outgoing(self, exchange: Exchange) -> Exchange:
        """Return what of an exchange may be sent: all, or nothing but what the node wants."""
        if not self.ledger["silent"]:
            return exchange
        note_C = None if exchange.note_C is None else torch.zeros_like(exchange.note_C)
        return replace(
            exchange,
            cluster_CK=torch.full_like(exchange.cluster_CK, NO_CLUSTER),
            model_CKP=torch.zeros_like(exchange.model_CKP),
            note_C=note_C,
        )

    def settle(self, round: int) -> None:
        """Pay for the end of a round, and keep what newcomers may have of it."""
        self.pay(round, "-end")
        self.keep_shared()

    def keep_shared(self) -> None:
        """Keep what newcomers may have: the state is paid for, and not yet fine-tuned at home."""
        is_final = self.journal.last.get("event") == "final"
        if self.runner.state is not None and not is_final and not self.ledger["silent"]:
            cluster_CK, model_CKP = self.runner.plan.algorithm.share(self.runner.state)
            self.shared = cluster_CK.clone(), model_CKP.clone()

    # ---- neighbours

    def record_receiver(self, neighbour: str) -> None:
        """Write, before something is sent, that a neighbour knows of all releases so far."""
        known = self.ledger["received"].get(neighbour, 0)
        if known < self.ledger["sendable"]:
            self.ledger["received"][neighbour] = self.ledger["sendable"]
            self._write()

    def record_announcement(self, neighbour: str) -> None:
        """Write that a neighbour is told something, unless it follows from public things alone."""
        if not self.runner.plan.algorithm.HAS_PUBLIC_ANNOUNCEMENTS:
            self.record_receiver(neighbour)

    def offer_to_newcomer(self, neighbour: str) -> tuple[Tensor, Tensor]:
        """Return what a newcomer may have."""
        if self.shared is None:
            raise RejectedError("this node has nothing to share that its privacy budget covers.")
        self.record_receiver(neighbour)
        return self.shared

    # ---- the cost

    def epsilon(self, known: int) -> float:
        """Return the epsilon of the first releases."""
        paid = self.ledger["releases"][:known]
        spent = (Release(*release) for entry in paid for release in entry["spent"])
        return epsilon(spent, self.budget.options.delta)

    def report(self) -> Json:
        """Return the node's epsilon against all neighbours together, and against each."""
        received = self.ledger["received"]
        return {
            "delta": self.budget.options.delta,
            "budget": self.budget.limit,
            "epsilon": round(self.epsilon(max(received.values(), default=0)), 6),
            "neighbours": {name: round(self.epsilon(n), 6) for name, n in sorted(received.items())},
            "silent": self.ledger["silent"],
        }


def _read_secret(path: Path) -> bytes:
    """Return the node's secret; the system's randomness makes it once."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    return path.read_bytes()
