"""The contract of a method, as checks that each raise MethodError with one sentence.

What the engines promise rests on what a method promises: the same bits for any blocks, workers,
peers and interruptions, nothing from further than one hop in a round, and no use of other clients
besides the exchanges.

Shapes: C clients, S clusters, P parameters of a model, E examples.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.machine import HAS_FORK
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan
from fedspd.testing.strict_engine import StrictEngine
from fedspd.testing.subject import (
    CLASSES,
    COUNTS,
    FEATURES,
    ROUNDS,
    TASKS,
    VALUES,
    Subject,
    make_examples,
    path_graph,
    run,
    run_rounds,
)

Check = Callable[[Subject], None]
WORKERS = (1, 3) if HAS_FORK else (1,)
ENGINES: dict[str, Callable[[Plan], Any]] = {
    **{f"workers = {count}": partial(Simulator, workers=count) for count in WORKERS},
    "every client alone": StrictEngine,
}
BLOCKS = ([[4, 0], [3, 1], [2]], [[2, 3, 4], [1, 0]], [[3], [0, 1, 2, 4]])
MIXTURE_TOLERANCE = 1e-3  # of a sum of shares to 1
NEWCOMERS = (5, 6)  # client 5 receives from 3 and 4, client 6 from no one
JOINED = Graph.from_edges(7, [(0, 1), (1, 2), (2, 3), (3, 4), (5, 3), (5, 4)])


def check_method(method: Callable[..., AnyAlgorithm], *, clusters: int = 2, **options: Any) -> None:
    """Raise MethodError for the first part of the contract that a method breaks.

    The class gets `clusters` and the options as arguments. A method that works with one cluster
    alone is checked with clusters=1. The last check, on peers, needs the extra `node`.
    """
    subject = Subject(method, clusters, options)
    for check in CHECKS:
        check(subject)


def check_engines_agree(subject: Subject) -> None:
    """The final states have the same bits with 1 and 3 workers and with every client alone.

    The run with one worker is the reference.
    """
    _, *others = ENGINES.items()
    for task in TASKS:
        expected = subject.reference(task)
        for name, make in others:
            with _closing(make(subject.plan(task))) as engine:
                _require_equal(
                    subject, f"the result with {name}", run(engine, path_graph()), expected
                )


def check_blocks_do_not_matter(subject: Subject) -> None:
    """The final states do not depend on which clients share a block, nor on their order there."""
    for task, blocks in ((task, blocks) for task in TASKS for blocks in BLOCKS):
        found = run(StrictEngine(subject.plan(task), blocks), path_graph())
        expected = subject.reference(task)
        _require_equal(subject, f"the result of the blocks {blocks}", found, expected)


def check_resume_is_exact(subject: Subject) -> None:
    """A run that is stopped after round 2 and resumed ends as an uninterrupted one."""
    engines = [*ENGINES.items()]
    following = engines[1:] + engines[:1]
    for (name, make), (next_name, make_next) in zip(engines, following, strict=True):
        with (
            tempfile.TemporaryDirectory() as folder,
            _closing(make(subject.plan())) as before,
            _closing(make_next(subject.plan())) as after,
        ):
            run_rounds(before, path_graph(), 1, 2).save(Path(folder))
            after.load(Path(folder))
            what = f"the state saved with {name} and loaded with {next_name}"
            _require_equal(subject, what, after.digests(), before.digests())
            found = run(after, path_graph(), first=3)
            _require_equal(subject, f"{what}, then trained further,", found, subject.reference())


def check_steps_are_pure(subject: Subject) -> None:
    """A round and the final phase leave the old state alone, so they can be repeated."""
    engine = run_rounds(StrictEngine(subject.plan()), path_graph(), 1, 2)
    states, digests = [runner.state for runner in engine.runners], engine.digests()
    steps = {"round": partial(engine.round, 3, path_graph()), "finish": partial(engine.finish, 3)}
    for name, step in steps.items():
        results = []
        for _ in range(2):
            step()
            results.append(engine.digests())
            for runner, state in zip(engine.runners, states, strict=True):
                runner.state = state
            is_same = engine.digests() == digests
            subject.require(is_same, f"{name} changes the old state; expected a new one.")
        _require_equal(subject, f"a repeated {name}", results[1], results[0])


def check_randomness_comes_from_the_key(subject: Subject) -> None:
    """The global random generators are neither used nor changed, and another seed matters."""
    expected = subject.reference()
    for draw in (partial(torch.rand, 1), np.random.rand, random.random):
        draw()
    before = _random_states()
    found = run(StrictEngine(subject.plan()), path_graph())
    _require_equal(subject, "the result after other global draws", found, expected)
    is_same = _random_states() == before
    subject.require(is_same, "it draws from a global generator; expected draws from the key alone.")
    others = [
        run_rounds(StrictEngine(subject.plan(seed=seed)), path_graph(), 1, 2).digests()
        for seed in (1, 2)
    ]
    differ = all(one != other for one, other in zip(*others, strict=True))
    subject.require(differ, "two seeds give the same result; expected draws from the key.")


def check_predictions_fit(subject: Subject) -> None:
    """Predictions have the right shape and type before, between and after rounds."""
    x = torch.randn(7, FEATURES, generator=torch.Generator().manual_seed(2))
    for task, clusters in ((task, S) for task in TASKS for S in {1, subject.clusters}):
        plan, shape = subject.plan(task, clusters=clusters), (7, _outputs(task))
        engine = StrictEngine(plan)
        first_round, finish = partial(engine.round, 1, path_graph()), partial(engine.finish, 2)
        for step in (engine.begin, first_round, finish):
            step()
            for output in _predictions(engine, x):
                found = f"predict gives {output.dtype} of shape {tuple(output.shape)}"
                expected = f"expected finite {plan.learner.dtype} of shape {shape}"
                fits = output.shape == shape and output.dtype == plan.learner.dtype
                is_right = fits and bool(output.isfinite().all())
                subject.require(is_right, f"{found} with clusters = {clusters}; {expected}.")


def check_states_are_finite(subject: Subject) -> None:
    """After rounds and the final phase, no value of a state is NaN or infinite."""
    for task, clusters in ((task, S) for task in TASKS for S in {1, subject.clusters}):
        engine = StrictEngine(subject.plan(task, clusters=clusters), [range(5)])
        run(engine, path_graph())
        state = engine.runners[0].state
        for field in fields(state):
            is_finite = bool(getattr(state, field.name).isfinite().all())
            sentence = f"the field '{field.name}' of its state is not finite with S = {clusters}."
            subject.require(is_finite, sentence)


def check_observation_fits(subject: Subject) -> None:
    """What is observed has the documented shapes, and a personal model predicts as `predict`."""
    for task in TASKS:
        plan = subject.plan(task)
        engine = StrictEngine(plan, [range(5)])
        run(engine, path_graph())
        (runner,) = engine.runners
        seen, learner = runner.observe(), plan.learner
        sizes = {
            "C": 5,
            "S": plan.algorithm.cluster_limit,
            "P": learner.size,
            "E": plan.train.width,
        }
        for field in fields(seen):
            table = getattr(seen, field.name)
            axes = field.name.rpartition("_")[2]
            columns = 0 if table is None or not table.ndim else table.shape[-1]
            shape = tuple({**sizes, "M": columns}[axis] for axis in axes)  # M is any number
            is_right = table is None or tuple(table.shape) == shape
            subject.require(is_right, f"observe gives another shape of {field.name} than {shape}.")
        if seen.mixture_CS is not None:
            is_one = (seen.mixture_CS.sum(1) - 1).abs().max() < MIXTURE_TOLERANCE
            subject.require(bool(is_one), "a row of the observed mixture_CS does not sum to 1.")
        if seen.assignment_CE is not None:
            is_there = ((seen.assignment_CE >= 0) == plan.train.present_CE).all()
            subject.require(bool(is_there), "assignment_CE is not -1 exactly beyond the examples.")
        if seen.model_CP is not None:
            ours = learner.predict(seen.model_CP, plan.test.x)
            theirs = plan.algorithm.predict(learner, runner.state, plan.test.x)
            is_same = all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
            subject.require(is_same, "the observed model_CP predicts otherwise than predict.")
        is_measured = np.isfinite(engine.measure().test_loss_C).all()
        subject.require(bool(is_measured), "the test loss of a client is not finite.")


def check_small_networks_work(subject: Subject) -> None:
    """One client alone, with one example or several, with a server or without, can train."""
    for server, examples in ((server, n) for server in (False, True) for n in (1, 8)):
        plan = subject.plan(counts=[examples], server=server)
        graph = Graph.from_edges(1, [], "examples", server)
        digests = []
        for make in (Simulator, StrictEngine):
            engine: Any = make(plan)
            digests.append(run(engine, graph, last=2))
            is_finite = np.isfinite(engine.measure().test_loss_C).all()
            subject.require(bool(is_finite), "the test loss of a network of one is not finite.")
        _require_equal(subject, "a network of one by itself", digests[1], digests[0])


def check_isolated_client_trains_alone(subject: Subject) -> None:
    """A client without neighbours ends as if no one had any."""
    without_client_4 = Graph.from_edges(5, [(0, 1), (1, 2), (2, 3)])
    among, alone = (
        run(StrictEngine(subject.plan()), graph)[4:]
        for graph in (without_client_4, Graph.from_edges(5, []))
    )
    _require_equal(subject, "a client without neighbours", among, alone)


def check_news_travels_one_hop_in_an_exchange(subject: Subject) -> None:
    """Other examples at one client change nothing further away than exchanges have passed."""
    plan = subject.plan()
    x, y = list(plan.train.x), list(plan.train.y)
    x[4], y[4] = x[4].flip(0) + 1, (y[4] + 1) % CLASSES
    other = replace(plan, train=replace(plan.train, x=x, y=y))
    one, two = StrictEngine(plan), StrictEngine(other)
    one.begin()
    two.begin()
    hops = 0
    for t in (1, 2, 3):
        hops += len(one.round(t, path_graph()))
        two.round(t, path_graph())
        pairs = enumerate(zip(one.digests(), two.digests(), strict=True))
        changed = {i for i, (a, b) in pairs if a != b}
        subject.require(4 in changed, "a client's own examples change nothing in its state.")
        is_near = all(4 - i <= hops for i in changed)
        sentence = f"clients {sorted(changed)} know of client 4's examples after {hops} exchanges"
        subject.require(is_near, f"{sentence} on a path; expected one hop in an exchange.")


def check_strangers_do_not_matter(subject: Subject) -> None:
    """Another model of a client changes nothing further away than a round has exchanges."""
    one, two = (run_rounds(StrictEngine(subject.plan()), path_graph(), 1, 1) for _ in range(2))
    stranger = two.runners[4]
    size = stranger.plan.learner.size
    tables = {
        name: table * 2 if table.shape[-1] == size else table
        for name, table in stranger.tables().items()
    }
    stranger.state = type(stranger.state)(**tables)
    hops = [len(engine.round(2, path_graph())) for engine in (one, two)]
    strangers = slice(max(0, 4 - hops[0]))
    found, expected = two.digests()[strangers], one.digests()[strangers]
    _require_equal(subject, "a client that is too far from a changed model", found, expected)


def check_newcomers_join(subject: Subject) -> None:
    """A newcomer gets a state like the others' from its neighbours alone, in any block."""
    if not subject.has_newcomers:
        return
    for task in TASKS:
        engine = run_rounds(StrictEngine(subject.plan(task), [range(5)]), path_graph(), 1, 2)
        plan, trained = engine.runners[0].plan, engine.runners[0].state
        _check_share(subject, plan, trained)
        together = _join(task, plan, trained, NEWCOMERS)
        for field in fields(trained):
            old, new = getattr(trained, field.name), getattr(together[0], field.name)
            is_like = (new.shape[1:], new.dtype) == (old.shape[1:], old.dtype)
            subject.require(
                is_like, f"join gives another '{field.name}' than trained clients have."
            )
        for c, client in enumerate(NEWCOMERS):
            alone = _join(task, plan, trained, [client])
            is_same = all(_same(a, _row(b, c)) for a, b in zip(alone, together, strict=True))
            subject.require(is_same, "join depends on which newcomers share a block.")
        stranger, _ = _join(task, plan, trained, NEWCOMERS[:1], spoiled=1)
        is_same = _same(stranger, _row(together[0], 0))
        subject.require(is_same, "join uses the models of a client that is not a neighbour.")
        for state in together:
            outputs = plan.algorithm.predict(plan.learner, state, _newcomer_data(task).x)
            is_finite = all(bool(output.isfinite().all()) for output in outputs)
            subject.require(is_finite, "the predictions of a newcomer are not finite.")


def check_peers_agree(subject: Subject) -> None:
    """Peers that exchange messages in this process end in the same states as the simulator."""
    from fedspd.testing.peers import run_peers  # needs the extra `node`

    found = run_peers(subject.plan(), path_graph(), ROUNDS)
    _require_equal(subject, "the result of peers", found, subject.reference())


CHECKS: tuple[Check, ...] = (
    check_engines_agree,
    check_blocks_do_not_matter,
    check_resume_is_exact,
    check_steps_are_pure,
    check_randomness_comes_from_the_key,
    check_predictions_fit,
    check_states_are_finite,
    check_observation_fits,
    check_small_networks_work,
    check_isolated_client_trains_alone,
    check_news_travels_one_hop_in_an_exchange,
    check_strangers_do_not_matter,
    check_newcomers_join,
    check_peers_agree,
)


# ---- helpers


def _require_equal(
    subject: Subject, what: str, found: Sequence[str], expected: Sequence[str]
) -> None:
    differ = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    clients = ", ".join(map(str, differ))
    sentence = f"{what} differs at clients {clients}; expected the same bits."
    subject.require(not differ, sentence)


@contextmanager
def _closing(engine: Any) -> Iterator[Any]:
    try:
        yield engine
    finally:
        engine.close()


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def _outputs(task: str) -> int:
    return CLASSES if task == "classes" else VALUES


def _predictions(engine: StrictEngine, x: Tensor) -> list[Tensor]:
    """Return the predictions of every client for the same examples."""
    return [
        runner.plan.algorithm.predict(runner.plan.learner, runner.state, [x])[0]
        for runner in engine.runners
    ]


def _check_share(subject: Subject, plan: Plan, state: Any) -> None:
    cluster_CK, model_CKP = plan.algorithm.share(state)
    rows, limit = cluster_CK.tolist(), plan.algorithm.offer_limit
    is_known = all(row == rows[0] and set(row) <= set(range(limit)) for row in rows)
    is_known = is_known and len(set(rows[0])) == len(rows[0]) and len(rows) == len(COUNTS)
    subject.require(is_known, f"share gives the clusters {rows}; expected the same in every row.")
    first = plan.algorithm.begin(plan.learner, plan.train, plan.key)
    shape, expected = tuple(model_CKP.shape), tuple(plan.algorithm.share(first)[1].shape)
    is_fixed = shape == expected and shape[:2] == tuple(cluster_CK.shape)
    subject.require(is_fixed, f"share gives models of shape {shape}; expected {expected}.")
    most = plan.algorithm.size_limit(plan.learner)
    sentence = f"share gives vectors of {shape[2]} numbers; expected at most {most}."
    subject.require(shape[2] <= most, sentence)


def _newcomer_data(task: str, clients: Sequence[int] = NEWCOMERS) -> Block:
    x, y = make_examples(task, [6, 3], 3)
    rows = [client - NEWCOMERS[0] for client in clients]
    return Block(clients, 7, [x[c] for c in rows], [y[c] for c in rows], max(COUNTS))


def _join(
    task: str,
    plan: Plan,
    trained: Any,
    clients: Sequence[int],
    spoiled: int | None = None,
) -> tuple[Any, Any]:
    """Return the states of newcomers after join and after finish; one client may share NaN."""
    cluster_CK, model_CKP = plan.algorithm.share(trained)
    model_CKP = model_CKP.clone()
    if spoiled is not None:
        model_CKP[spoiled] = torch.nan
    weight_CK = plan.train.counts_C[:, None].expand_as(cluster_CK)
    offers = Exchange(cluster_CK, model_CKP, weight_CK, cluster_CK)
    data, key = _newcomer_data(task, clients), plan.key.at(3)
    neighbourhood = Neighbourhood.of(JOINED, clients, offers, np.arange(len(COUNTS)))
    joined = plan.algorithm.join(plan.learner, data, neighbourhood, key)
    return joined, plan.algorithm.finish(plan.learner, joined, data, key)


def _same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
    )


def _row(state: Any, c: int) -> Any:
    tables = {field.name: getattr(state, field.name)[c : c + 1] for field in fields(state)}
    return type(state)(**tables)
