"""An exchange waits for events and timers, without polling.

Most tests run in virtual time: the event loop jumps to the next timer at once, so that a wait of
minutes ends exactly when it should, on a busy machine too.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from chaos.virtual_time import InstantLoop, run_instantly, virtual_time
from fedspd.core.errors import RefusedError, RejectedError, UnreachableError
from fedspd.core.exchange import Exchange
from fedspd.node.identity.manifest import Manifest, Member
from fedspd.node.peer import liveness
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.liveness import MAX_TICK_SECONDS, Timeouts
from fedspd.node.peer.protocol import GRACE_SECONDS, ExchangeProtocol
from fedspd.node.wire.memory import MemoryNetwork
from fedspd.node.wire.messages import Announcement, Hello
from fedspd.node.wire.misbehaviour import LOG_INTERVAL_SECONDS

FIRST = ExchangeId(1, 0)
SIZE = 4  # parameters
RUNNER: Any = SimpleNamespace(own_models=torch.ones(1, SIZE))  # what offers are compared with
# no end that a test expects coincides with a heartbeat of this node, which also wakes a wait
TIMEOUTS = Timeouts(max_deadline=121, heartbeat_interval=3, down_after=10)


@pytest.fixture
def loop() -> Iterator[InstantLoop]:
    """Return a loop whose time is that of the protocol's clock as well."""
    with virtual_time() as loop:
        yield loop


class OneNeighbour:
    """The transport of a node whose neighbour b receives announcements, and offers nothing."""

    def __init__(self) -> None:
        self.has_muted, self.answers_heartbeats = False, True
        self.received = asyncio.Event()
        self.received.set()

    async def start(self, handler: object) -> None: ...

    async def stop(self) -> None: ...

    async def hello(self, neighbour: str, hello: Hello, timeout_seconds: float) -> Hello:
        if not self.answers_heartbeats:
            raise UnreachableError("b does not answer heartbeats.")
        return Hello("agreed", 1, "host:2")

    async def announce(
        self, neighbour: str, announcement: Announcement, timeout_seconds: float
    ) -> None:
        await self.received.wait()

    def is_muted(self, neighbour: str) -> bool:
        return self.has_muted


def build_protocol(transport: OneNeighbour) -> ExchangeProtocol:
    context = NodeContext(
        "a", 0, "host:1", {"b": 1}, "agreed", rounds=9, rule="uniform", evaluate_every=1
    )
    return ExchangeProtocol(context, RUNNER, cast(Any, transport), TIMEOUTS)


def offer_cluster(cluster: int) -> Exchange:
    cluster_CK, one = torch.tensor([[cluster]]), torch.ones(1, 1)
    return Exchange(cluster_CK, torch.full((1, 1, SIZE), float(cluster)), one, cluster_CK)


def announce_other_cluster(protocol: ExchangeProtocol) -> None:
    """Let b announce another cluster than a wants: there is nothing to fetch."""
    protocol.handle_announcement("b", Announcement(1, 0, (1,), (1.0,), (1,), 0, 1))


def greet(protocol: ExchangeProtocol) -> None:
    """Let b send a heartbeat from round 1."""
    protocol.handle_hello("b", Hello("agreed", 1, "host:2"))
    protocol.detector.record_reached("b")


def run_exchange(
    loop: InstantLoop, transport: OneNeighbour, script: dict[float, Callable[..., object]]
) -> tuple[float, list[str], ExchangeProtocol]:
    """Run an exchange in which b does something at given seconds.

    Return when it ended, who answered, and the protocol.
    """

    async def run() -> tuple[float, list[str], ExchangeProtocol]:
        protocol = build_protocol(transport)
        await protocol.start()
        protocol.advance(FIRST)
        for seconds, act in script.items():
            act(protocol) if seconds == 0 else loop.call_later(seconds, act, protocol)
        answers = await protocol.run_exchange(FIRST, offer_cluster(0))
        ended = loop.time()
        await protocol.stop()
        return ended, list(answers), protocol

    return loop.run_until_complete(run())


def test_exchange_ends_when_the_announcement_of_the_neighbour_arrives(
    loop: InstantLoop,
) -> None:
    ended, answers, protocol = run_exchange(
        loop, OneNeighbour(), {0: greet, 7: announce_other_cluster}
    )
    assert (ended, answers) == (pytest.approx(7), ["b"])
    assert list(protocol.detector.neighbours["b"].response_seconds) == [pytest.approx(7)]


def test_exchange_ends_when_the_neighbour_has_received_the_announcement(
    loop: InstantLoop,
) -> None:
    """If b first learned of the next round, it would not wait for the models of this one."""
    transport = OneNeighbour()
    transport.received.clear()
    ended, answers, _ = run_exchange(
        loop,
        transport,
        {0: greet, 1: announce_other_cluster, 8: lambda _: transport.received.set()},
    )
    assert (ended, answers) == (pytest.approx(8), ["b"])


def test_exchange_gives_up_a_silent_neighbour_after_ten_seconds(loop: InstantLoop) -> None:
    ended, answers, protocol = run_exchange(loop, OneNeighbour(), {0: greet, 4: greet})
    assert (ended, answers) == (pytest.approx(14, abs=0.01), [])
    assert protocol.detector.neighbours["b"].missed_deadlines == 0


def test_exchange_ends_at_the_deadline(loop: InstantLoop) -> None:
    heartbeats = dict.fromkeys((float(seconds) for seconds in range(0, 200, 5)), greet)
    ended, answers, protocol = run_exchange(loop, OneNeighbour(), heartbeats)
    assert (ended, answers) == (pytest.approx(60, abs=0.01), [])  # its budget
    assert protocol.detector.neighbours["b"].missed_deadlines == 1


def test_second_exchange_of_a_round_refunds_nothing(loop: InstantLoop) -> None:
    """In the first one b answers at once, in the second one after 7 seconds."""

    async def run() -> float:
        protocol, second = build_protocol(OneNeighbour()), ExchangeId(1, 1)
        await protocol.start()
        protocol.advance(FIRST)
        greet(protocol)
        announce_other_cluster(protocol)
        await protocol.run_exchange(FIRST, offer_cluster(0))
        late = Announcement(*second, (1,), (1.0,), (1,), 0, 1)
        loop.call_later(7, protocol.handle_announcement, "b", late)
        await protocol.run_exchange(second, offer_cluster(0))
        await protocol.stop()
        return protocol.detector.neighbours["b"].budget_seconds

    assert loop.run_until_complete(run()) == pytest.approx(60 - 7)


def test_exchange_does_not_wait_for_a_neighbour_that_is_ahead(loop: InstantLoop) -> None:
    ended, answers, _ = run_exchange(
        loop,
        OneNeighbour(),
        {0: greet, 4: lambda protocol: protocol.handle_hello("b", Hello("agreed", 2, "host:2"))},
    )
    assert (ended, answers) == (pytest.approx(4), [])


def test_exchange_does_not_wait_for_a_neighbour_that_is_muted(loop: InstantLoop) -> None:
    transport = OneNeighbour()

    def mute(protocol: ExchangeProtocol) -> None:
        transport.has_muted = True
        protocol.handle_mute("b")

    ended, answers, _ = run_exchange(loop, transport, {0: greet, 4: mute})
    assert (ended, answers) == (pytest.approx(4), [])


def test_exchange_of_a_leaving_node_ends_after_the_grace_period(loop: InstantLoop) -> None:
    ended, answers, _ = run_exchange(loop, OneNeighbour(), {0: greet, 5: ExchangeProtocol.leave})
    assert (ended, answers) == (pytest.approx(5 + GRACE_SECONDS, abs=0.01), [])


def test_exchange_does_not_count_a_suspension_of_the_process(loop: InstantLoop) -> None:
    def suspend(_: ExchangeProtocol) -> None:
        loop.now += 60

    ended, _, _ = run_exchange(loop, OneNeighbour(), {0: greet, 4: suspend})
    assert ended == pytest.approx(10 + 60, abs=2 * liveness.MAX_TICK_SECONDS)


def test_wait_until_wakes_up_at_once_when_the_node_leaves(loop: InstantLoop) -> None:
    has_left = False

    def leave(protocol: ExchangeProtocol) -> None:
        nonlocal has_left
        has_left = True
        protocol.leave()

    async def run() -> float:
        protocol = build_protocol(OneNeighbour())
        loop.call_later(5, leave, protocol)
        await protocol.wait_until(lambda: has_left, 100)
        return loop.time()

    assert loop.run_until_complete(run()) == 5


def test_wait_until_looks_at_its_condition_only_after_changes(loop: InstantLoop) -> None:
    """Twelve heartbeats in a minute, one mark as down and the timeout: not thousands of looks."""
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return False

    async def run() -> float:
        protocol = build_protocol(OneNeighbour())
        await protocol.start()
        for seconds in range(5, 65, 5):
            loop.call_later(seconds, greet, protocol)
        await protocol.wait_until(look, 100)
        ended = loop.time()
        await protocol.stop()
        return ended

    assert loop.run_until_complete(run()) == pytest.approx(100, abs=0.01)
    # a heartbeat of this node ends every 3 seconds, and early timers may fire twice
    assert looks <= 1 + 12 + 2 * 34 + 2 * (1 + 1)


PATIENT = replace(TIMEOUTS, down_after=1000)


class Triangle:
    """Three protocols over the in-memory transport, without heartbeats of their own."""

    def __init__(self) -> None:
        members = tuple(
            Member(f"n{i}", i, f"host:{i + 1}", tuple(f"n{j}" for j in range(3) if j != i), i + 1)
            for i in range(3)
        )
        limits = SIZE, 2, SIZE, 1
        self.manifest = Manifest(
            "0" * 32, False, {"rounds": 9, "data": {}}, (3,), 2, *limits, "float32", members
        )
        network = MemoryNetwork()
        self.transports = [network.transport(self.manifest, f"n{i}") for i in range(3)]
        self.protocols = [self._build(i) for i in range(3)]

    def _build(self, i: int) -> ExchangeProtocol:
        neighbours = {f"n{j}": j for j in range(3) if j != i}
        agreement = self.manifest.agreement
        context = NodeContext(f"n{i}", i, f"host:{i + 1}", neighbours, agreement, 9, "uniform", 1)
        return ExchangeProtocol(context, RUNNER, self.transports[i], PATIENT)

    async def start(self) -> None:
        for transport, protocol in zip(self.transports, self.protocols, strict=True):
            await transport.start(protocol)
            protocol.advance(FIRST)
        await asyncio.gather(*(protocol.greet() for protocol in self.protocols))


def test_exchange_between_peers_in_memory_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three peers train cluster 0: these fetch the model of one another."""

    def refuse_to_sleep(seconds: float) -> None:
        raise AssertionError(f"slept for {seconds} seconds")

    async def run() -> list[dict[str, list[float]]]:
        triangle = Triangle()
        await triangle.start()
        monkeypatch.setattr(asyncio, "sleep", refuse_to_sleep)
        found = await asyncio.gather(
            *(
                protocol.run_exchange(FIRST, offer_cluster(cluster))
                for protocol, cluster in zip(triangle.protocols, (0, 0, 1), strict=True)
            )
        )
        return [
            {name: answer.offer.model_KP.flatten().tolist() for name, answer in answers.items()}
            for answers in found
        ]

    zeros = [0.0] * SIZE
    assert run_instantly(run()) == [
        {"n1": zeros, "n2": []},
        {"n0": zeros, "n2": []},
        {"n0": [], "n1": []},
    ]


def test_exchange_ends_when_malformed_messages_mute_the_last_neighbour() -> None:
    """n1 answers; n2 sends five malformed messages, without the protocol getting any of them."""

    async def run() -> list[str]:
        triangle = Triangle()
        await triangle.start()
        n0, n1, _ = triangle.protocols
        exchanges = [
            asyncio.create_task(protocol.run_exchange(FIRST, offer_cluster(0)))
            for protocol in (n0, n1)
        ]
        async with asyncio.timeout(600):  # until both wait for n2 alone
            await asyncio.sleep(0)
            while len(n0._tasks) > 1 or len(n1._tasks) > 1:
                await asyncio.sleep(0.01)
        for _ in range(5):
            with pytest.raises(RejectedError):
                async for _ in triangle.transports[2].send("n0", "Announce", b"malformed", 1.0):
                    pass
        async with asyncio.timeout(60):  # the deadline is 121 seconds
            answers = await exchanges[0]
        exchanges[1].cancel()
        return list(answers)

    assert run_instantly(run()) == ["n1"]


# ---- the log


def test_log_names_a_neighbour_that_goes_up_and_down_once(
    loop: InstantLoop, caplog: pytest.LogCaptureFixture
) -> None:
    transport = OneNeighbour()

    def stop_answering(protocol: ExchangeProtocol) -> None:
        transport.answers_heartbeats = False

    async def run() -> None:
        protocol = build_protocol(transport)
        await protocol.start()
        greet(protocol)
        loop.call_later(5, stop_answering, protocol)
        await asyncio.sleep(40)
        await protocol.stop()

    caplog.set_level("INFO", "fedspd.node")
    loop.run_until_complete(run())
    assert [record.message for record in caplog.records] == [
        "neighbour up: node=b round=1",
        'neighbour down: node=b round=1 error="b does not answer heartbeats."',
    ]


class FlappingNeighbour(OneNeighbour):
    """A neighbour that refuses every other connection."""

    async def hello(self, neighbour: str, hello: Hello, timeout_seconds: float) -> Hello:
        self.answers_heartbeats = not self.answers_heartbeats
        if not self.answers_heartbeats:
            raise RefusedError("connection refused.")
        return await super().hello(neighbour, hello, timeout_seconds)


def test_log_has_few_lines_for_a_neighbour_that_goes_up_and_down_all_the_time(
    loop: InstantLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        protocol = build_protocol(FlappingNeighbour())
        await protocol.start()
        for _ in range(300):
            protocol.handle_hello("b", Hello("agreed", 1, "host:2"))
            await asyncio.sleep(1)
        await protocol.stop()

    caplog.set_level("INFO", "fedspd.node")
    loop.run_until_complete(run())
    for event in ("neighbour up: ", "neighbour down: "):
        assert 10 < caplog.text.count(event) <= 300 / LOG_INTERVAL_SECONDS


async def pass_time(protocol: ExchangeProtocol, seconds: float) -> None:
    """Let virtual time pass, and the protocol's clock with it."""
    end = protocol.clock() + seconds
    while protocol.clock() < end:
        await asyncio.sleep(MAX_TICK_SECONDS / 4)


def test_log_has_one_line_for_an_error_that_differs_in_its_round_alone(
    loop: InstantLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that catches up is told in each exchange that it is late."""
    protocol = build_protocol(OneNeighbour())
    for round in (7, 8, 19):
        protocol._record_error("b", RejectedError(f"round {round} is over."))
    loop.run_until_complete(pass_time(protocol, LOG_INTERVAL_SECONDS))
    protocol._record_error("b", RejectedError("expired."))
    assert [record.message for record in caplog.records] == [
        'call failed: node=b error="round 7 is over."',
        'call failed: node=b error="expired."',
    ]
