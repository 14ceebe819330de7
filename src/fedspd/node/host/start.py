"""The way from a bundle to a running peer."""

import asyncio
import logging
import os
import signal
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import torch

from fedspd.core.errors import ConfigError, StorageError
from fedspd.core.imports import installed_code_only
from fedspd.experiment.build import build_budget
from fedspd.experiment.interrupts import Interrupts, interrupts
from fedspd.node.host.bundle import Bundle
from fedspd.node.host.plan import build_plan
from fedspd.node.host.status import StatusServer, node_status
from fedspd.node.identity.certificates import now
from fedspd.node.identity.manifest import check_address
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.peer.privacy import NodePrivacy
from fedspd.node.wire.grpc_transport import GrpcTransport
from fedspd.privacy.budget import delta_warning
from fedspd.privacy.mechanisms import NbAFL
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.processes import keep_memory

log = logging.getLogger("fedspd.node")
WARNING_DAYS = 30  # before a certificate expires


def run(
    bundle: Bundle,
    *,
    data: str | None = None,
    state: Path | None = None,
    listen: str | None = None,
    status_port: int = 0,
    insecure_plaintext: bool = False,
    joining: bool = False,
    timeouts: Timeouts | None = None,
) -> None:
    """Run one peer until it is done or told to stop; with `joining`, accept newcomers only."""
    torch.set_num_threads(1)
    keep_memory()
    if joining and not bundle.is_newcomer:
        raise ConfigError(
            f"--bundle {bundle.folder}: '{bundle.identity.name}' belongs to the network from its "
            "beginning; expected a newcomer of 'fedspd network add'. "
            "Start this node with 'fedspd node run'."
        )
    transport = GrpcTransport(
        bundle.manifest,
        bundle.folder,
        bundle.identity.name,
        insecure_plaintext=insecure_plaintext,
        address=check_address(listen) if listen else None,
    )
    with interrupts() as stop, closing(_open_journal(bundle, state)) as journal:
        if transport.tls:
            transport.tls.remember_revocations(journal.run_folder.folder / "revocations")
        context = _build_context(bundle, transport)
        with installed_code_only():
            runner = BlockRunner(build_plan(bundle, data))
        _log_start(bundle, transport.address, journal, runner)
        privacy = _protect(bundle, journal, runner)
        peer = Peer(context, runner, journal, transport, timeouts, privacy)
        server = StatusServer(
            lambda: node_status(peer, transport, bundle.valid_until),
            journal.run_folder.folder,
            status_port,
        )
        asyncio.run(_serve(peer, server, stop))
        done = min(journal.last.get("round", 0), context.rounds)  # the final phase is one more
        log.info("node stopped: node=%s round=%d", context.name, done)


async def _serve(peer: Peer, server: StatusServer, stop: Interrupts) -> None:
    _leave_on_signals(peer)
    stop.check()  # from here on, a signal asks the peer to leave
    await server.start()
    try:
        await peer.run()
    finally:
        await server.stop()


def _leave_on_signals(peer: Peer) -> None:
    """Let SIGTERM and Ctrl-C end the peer after its step."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, peer.leave)
        except NotImplementedError:  # the event loop of Windows takes no handlers
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(peer.leave))


def _log_start(bundle: Bundle, address: str, journal: Journal, runner: BlockRunner) -> None:
    identity, (examples,) = bundle.identity, runner.plan.train.counts_C
    log.info(
        "node started: node=%s version=%s network=%s address=%s state=%s method=%s examples=%d",
        identity.name,
        version("fedspd"),
        bundle.manifest.network,
        address,
        journal.run_folder.folder,
        bundle.config.method,
        examples,
    )
    if (until := bundle.valid_until) and (days := (until - now()).days) < WARNING_DAYS:
        log.warning("certificate expires soon: until=%s days=%d", until.isoformat(), days)


def _protect(bundle: Bundle, journal: Journal, runner: BlockRunner) -> NodePrivacy | None:
    """Return the node's ledger, and log what the rounds cost; None without privacy."""
    budget, options = build_budget(bundle.config), bundle.config.privacy
    if budget is None:
        return None
    examples, rounds = int(runner.plan.train.counts_C[0]), len(budget.rounds)
    made = budget.mechanism
    noise = "by-examples" if isinstance(made, NbAFL) else f"{made.noise:.4g}"
    log.info(
        "privacy planned: mechanism=%s unit=%s clip=%g noise=%s epsilon=%.4g delta=%g rounds=%d",
        options.mechanism,
        options.unit,
        options.clip,
        noise,
        budget.epsilon_after(rounds),
        options.delta,
        rounds,
    )
    if delta_warning(options, examples):
        log.warning("delta exceeded 1 / examples: delta=%g examples=%d", options.delta, examples)
    return NodePrivacy(journal, runner, budget)


def _build_context(bundle: Bundle, transport: GrpcTransport) -> NodeContext:
    identity, manifest, config = bundle.identity, bundle.manifest, bundle.config
    clients = {member.name: member.client for member in manifest.members}
    names = dict.fromkeys((*identity.neighbours, *manifest.member(identity.name).neighbours))
    if unknown := [name for name in names if name not in clients]:
        raise StorageError(
            f"--bundle {bundle.folder}: manifest.json does not know '{unknown[0]}', a neighbour "
            "of this node; expected all its neighbours. Copy the bundle again."
        )
    neighbours = {
        name: clients[name]
        for name in names
        if not (transport.tls and transport.tls.is_revoked(name))
    }
    return NodeContext(
        name=identity.name,
        client=identity.client,
        address=identity.address,
        neighbours=neighbours,
        agreement=manifest.agreement,
        rounds=config.rounds,
        rule=config.topology.rule,
        evaluate_every=config.evaluate_every,
        clients=config.clients,
        is_newcomer=bundle.is_newcomer,
    )


def _open_journal(bundle: Bundle, state: Path | None) -> Journal:
    folder = bundle.journal_folder(state)
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not _is_journal(folder):
        raise StorageError(
            f"--state {folder}: exists, but is not a journal of a node; expected a journal or an "
            "empty folder. Give another one with --state."
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise StorageError(
            f"--state {folder}: this user cannot write to '{existing}'; expected a folder for the "
            "node's journal. Give one with --state, or correct its owner."
        )
    return Journal(folder, bundle.owner)


def _is_journal(folder: Path) -> bool:
    """Return whether a node began here: a copy may lack .lock, an aborted start run.json."""
    return (folder / ".lock").exists() or (folder / "run.json").exists()
