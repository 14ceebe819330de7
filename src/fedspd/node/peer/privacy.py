"""The privacy of one node: its ledger, in its journal, and the secret of its noise.

A release is written into the ledger before anything of it is sent. Its noise follows from a secret
of the node, its data, the state that the round starts from, and the models that it trains. A node
that is killed and repeats a round from the same state makes the same release again, which costs
nothing; from another state, or after other answers, it draws other noise, and pays.
"""

import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedspd.core.errors import RejectedError, StorageError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.mechanism import Release
from fedspd.node.peer.journal import Journal, fingerprint
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.accounts import Accounts
from fedspd.privacy.budget import AnyMechanism, Budget
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import LEDGER, RunFolder

log = logging.getLogger("fedspd.node")

SECRET = "privacy.key"  # in the journal, beside the ledger
SECRET_BYTES = 32
LEDGER_FIELDS = ("data", "key", "delta", "releases", "received", "sendable", "silent")


class NodePrivacy(Accounts):
    """What this node has released of its examples, and which neighbour knows of how much.

    The runner pays into it while it computes, and the protocol records receivers meanwhile.
    """

    def __init__(self, journal: Journal, runner: BlockRunner, budget: Budget) -> None:
        super().__init__(budget.limit)
        self.journal, self.runner, self.budget = journal, runner, budget
        self._lock = threading.Lock()
        self.client = int(runner.plan.train.clients[0])
        mechanism = runner.plan.learner.mechanism
        assert isinstance(mechanism, AnyMechanism)
        self.mechanism = mechanism
        data = fingerprint(runner.plan.train)
        self._secret = self._read_secret()
        self.ledger: Json = self._open(data)
        self.shared: Exchange | None = None  # what newcomers may have
        self._context = hashlib.sha256(data["sha256"].encode()).digest()
        self._round, self._round_id, self._payments = 0, "start", 0
        self._use_secret("start")
        runner.accounts = self

    def _open(self, data: Json) -> Json:
        """Return the ledger of the journal, or a new one; never forget what was spent."""
        folder = self.journal.run_folder
        if not (folder.folder / LEDGER).exists():
            if folder.latest() is not None:
                raise StorageError(
                    f"'{folder.folder}': {LEDGER} is missing, the ledger of what this node has "
                    "released; expected it beside its rounds. Restore it from a copy."
                )
            new = {
                "data": data,
                "key": hashlib.sha256(self._secret).hexdigest(),
                "delta": self.budget.options.delta,
                "releases": [],
                "received": {},
                "sendable": 0,
                "silent": False,
            }
            folder.write(LEDGER, new)
            return new
        ledger = read_ledger(folder)
        if ledger["data"] != data:
            raise StorageError(
                f"--data: the training data have changed since this node first released something "
                f"({ledger['data']['examples']} examples then, {data['examples']} now); expected "
                "the same data. Give them, or start in another folder with --state."
            )
        if ledger["key"] != hashlib.sha256(self._secret).hexdigest():
            raise self._lost_secret()
        return ledger

    def _read_secret(self) -> bytes:
        """Return the node's secret; the system's randomness makes it once."""
        folder = self.journal.run_folder.folder
        if not (folder / SECRET).exists():
            if (folder / LEDGER).exists():  # other noise for a release that is paid for
                raise self._lost_secret()
            _write_secret(folder / SECRET)
        secret = (folder / SECRET).read_bytes()
        if len(secret) != SECRET_BYTES:
            raise self._lost_secret()
        return secret

    def _lost_secret(self) -> StorageError:
        return StorageError(
            f"'{self.journal.run_folder.folder}': {SECRET} is missing or not the one of {LEDGER}: "
            "the secret of this node's noise; expected the file that the node has written. Restore "
            "it from a copy."
        )

    def _use_secret(self, name: str) -> None:
        whole = self._secret + self._context + name.encode()
        self.mechanism.source.secret = hashlib.sha256(whole).digest()

    def _change(self, **fields: object) -> None:
        """Change fields of the ledger, first on the disk: what a full one refused is not known."""
        changed = {**self.ledger, **fields}
        self.journal.run_folder.write(LEDGER, changed)
        self.ledger = changed

    # ---- a round

    def begin_round(self, round: int) -> None:
        """Choose the noise of a round, by the state that it starts from."""
        self._round, self._payments = round, 0
        self._round_id = f"{round}-{self.runner.digests()[0]}"
        self._use_secret(self._round_id)
        self.mechanism.source.take_name()

    def begin_join(self, neighbourhood: Neighbourhood) -> None:
        """Choose the noise of a newcomer's first state, by the models that it received."""
        models = neighbourhood.offers.model_CKP.detach().cpu().contiguous().numpy()
        self._use_secret(f"join-{hashlib.sha256(models.tobytes()).hexdigest()}")

    def pay(self, client: int, releases: Sequence[Release]) -> None:
        """Write what was released since the last payment, before it is sent.

        A payment is named by all that its noise follows from: one that a restart repeats is in the
        ledger already.
        Releases beyond the budget make the node silent: what it trains from now on stays at home.
        """
        name = f"{self._round_id}-{self._payments}-{self.mechanism.source.take_name()}"
        self._payments += 1
        if not releases:
            return
        with self._lock:
            entries = self.ledger["releases"]
            if name in {entry["id"] for entry in entries}:
                return
            spent = [list(release) for release in releases]
            entries = [*entries, {"id": name, "round": self._round, "spent": spent}]
            was_silent, every = self.ledger["silent"], releases_of(entries)
            is_silent = was_silent or (self.limit is not None and not self.limit.permits(every))
            sendable = self.ledger["sendable"] if is_silent else len(entries)
            self._change(releases=entries, silent=is_silent, sendable=sendable)
            if is_silent and not was_silent:
                self._warn()

    def _warn(self) -> None:
        assert self.limit is not None
        log.warning(
            "privacy budget spent, this node sends nothing more: round=%d epsilon=%g spent=%.4g",
            self._round,
            self.limit.epsilon,
            epsilon_of(self.ledger, self.ledger["sendable"]),
        )

    def is_silent(self, client: int) -> bool:
        return bool(self.ledger["silent"])

    def keep_shared(self) -> None:
        """Keep what newcomers may have: the state is paid for, and not yet fine-tuned at home."""
        is_final = self.journal.last.get("event") == "final"
        if self.ledger["silent"]:
            self.shared = None
        elif self.runner.state is not None and not is_final:
            shared = self.runner.shared()
            cluster_CK, model_CKP = shared.cluster_CK.clone(), shared.model_CKP.clone()
            self.shared = replace(shared, cluster_CK=cluster_CK, model_CKP=model_CKP)

    # ---- neighbours

    def record_receiver(self, neighbour: str) -> None:
        """Write, before something is sent, that a neighbour knows of all releases so far."""
        with self._lock:
            known = self.ledger["received"].get(neighbour, 0)
            if known < self.ledger["sendable"]:
                received = {**self.ledger["received"], neighbour: self.ledger["sendable"]}
                self._change(received=received)

    def record_announcement(self, neighbour: str) -> None:
        """Write that a neighbour is told something, unless it follows from public things alone."""
        if not self.runner.plan.algorithm.HAS_PUBLIC_ANNOUNCEMENTS:
            self.record_receiver(neighbour)

    def offer_to_newcomer(self, neighbour: str) -> Exchange:
        """Return what a newcomer may have."""
        if self.shared is None:
            raise RejectedError("this node has nothing to share that its privacy budget covers.")
        self.record_receiver(neighbour)
        return self.shared

    # ---- the cost

    def report(self) -> Json:
        """Return the node's epsilon against all neighbours together, and against each."""
        return report_of(self.ledger, None if self.limit is None else self.limit.epsilon)


def read_ledger(folder: RunFolder) -> Json:
    """Return the ledger of a journal; refuse one that lacks a part."""
    ledger = folder.read(LEDGER)
    missing = [name for name in LEDGER_FIELDS if name not in ledger]
    try:
        problem = f"it has no '{missing[0]}'" if missing else ""
        releases_of(ledger["releases"])
        max(ledger["received"].values(), default=0) + ledger["sendable"] + float(ledger["delta"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = problem or f"an entry is not complete ({error!r})"
    if problem:
        raise StorageError(
            f"'{folder.folder / LEDGER}': {problem}; an older version has written it, or it is "
            "damaged. Restore it from a copy, or create the network again."
        )
    return ledger


def report_of(ledger: Json, budget: float | None) -> Json:
    """Return what a ledger says: the epsilon against all neighbours together, and against each."""
    received = ledger["received"]
    return {
        "delta": ledger["delta"],
        "budget": budget,
        "epsilon": round(epsilon_of(ledger, max(received.values(), default=0)), 6),
        "neighbours": {n: round(epsilon_of(ledger, k), 6) for n, k in sorted(received.items())},
        "silent": ledger["silent"],
    }


def epsilon_of(ledger: Json, known: int) -> float:
    """Return the epsilon of the first payments."""
    return epsilon(releases_of(ledger["releases"][:known]), float(ledger["delta"]))


def releases_of(entries: Sequence[Json]) -> list[Release]:
    """Return the releases of payments in a node's ledger."""
    return [Release(*release) for entry in entries for release in entry["spent"]]


def _write_secret(path: Path) -> None:
    """Write a new secret, by the system's randomness, that only its owner can read."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
