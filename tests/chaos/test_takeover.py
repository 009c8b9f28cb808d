"""Trainers that die, freeze or meet: another goes on, in the middle of the step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from peers.faults import Drop
from peers.leading import Start
from tests.chaos.harness import digits_manifest, reference
from tests.chaos.realm import Realm
from tests.chaos.trouble import run_realm_in

STEPS = 8
MANIFEST = digits_manifest(
    reproducible__enabled=True,
    limits__state_piece=64,
    run__steps=STEPS,
    run__checkpoint_every=0,
    start__replicas=2,
)
Scenario = Callable[[Realm], Awaitable[None]]


@pytest.fixture(scope="module")
def expected():
    return reference(MANIFEST, STEPS)


def run_with(trouble: Scenario, expected) -> Realm:
    return run_realm_in(trouble, expected, MANIFEST)


def test_without_trouble(expected) -> None:
    async def trouble(realm: Realm) -> None:
        del realm

    run_with(trouble, expected)


def test_a_standby_goes_on_within_the_lease(expected) -> None:
    took: list[float] = []

    async def trouble(realm: Realm) -> None:
        realm.seat(Start.STANDBY, key=2)
        await realm.reaches(2)
        await realm.kill_seat(realm.seats[0])
        began = anyio.current_time()
        await realm.reaches(len(realm.losses) + 1)
        took.append(anyio.current_time() - began)

    realm = run_with(trouble, expected)
    assert took[0] < MANIFEST.periods.lease_s + 5
    assert realm.seats[1].reigns


async def met(realm: Realm, kind: str, step: int, *, times: int = 1, replies: bool = False) -> None:
    """Until so many messages of ``kind`` of ``step`` have set out (and gone their way)."""
    seen = anyio.Event()
    left = times

    def look(link, header) -> bool:
        nonlocal left
        if header["kind"] == kind and link.is_reply is replies and len(realm.losses) == step:
            left -= 1
            if left <= 0:
                seen.set()
        return False

    rule = realm.faults.add(look, Drop())
    await seen.wait()
    realm.faults.remove(rule)


PHASES = [
    ("forward", 1, False),
    ("backward", 3, False),
    ("receipt", 9, False),
    ("receipt", 22, False),
    ("prepare", 1, False),
    ("prepare", 2, True),
    ("part", 2, False),
    ("sum", 1, False),
    ("vote", 1, False),
    ("vote", 4, False),
    ("decide", 1, False),
    ("decide", 1, True),
    ("decide", 2, True),
    ("decide", 4, True),
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: f"{p[0]}-{p[1]}{'-answered' * p[2]}")
def test_the_trainer_is_killed_in_any_phase(phase: tuple[str, int, bool], expected) -> None:
    kind, times, replies = phase

    async def trouble(realm: Realm) -> None:
        realm.seat(Start.STANDBY, key=2)
        await realm.reaches(2)
        await met(realm, kind, len(realm.losses) + 1, times=times, replies=replies)
        await realm.kill_seat(realm.seats[0])

    realm = run_with(trouble, expected)
    assert realm.seats[1].reigns


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_decision_reached_one_replica_only(which: int, expected) -> None:
    """The successor finishes it: all others hold the sum that it names."""

    async def trouble(realm: Realm) -> None:
        realm.seat(Start.STANDBY, key=2)
        await realm.reaches(2)
        victim = list(realm.peers.values())[which]
        realm.faults.add(
            lambda link, header: (
                header["kind"] == "decide"
                and not link.is_reply
                and link.source == realm.seats[0].peer_id
                and link.target != victim.peer_id
            ),
            Drop(),
        )
        at = len(realm.losses)
        await realm.until(lambda: victim.stage.mark is not None and victim.stage.mark.t > at)
        await realm.kill_seat(realm.seats[0])

    run_with(trouble, expected)


@pytest.mark.parametrize("seconds", [5.0, 30.0, 200.0])
def test_a_trainer_freezes_and_comes_back(seconds: float, expected) -> None:
    async def trouble(realm: Realm) -> None:
        realm.seat(Start.STANDBY, key=2)
        await realm.reaches(2)
        ends = realm.seats[0].peer_id
        frozen = realm.faults.add(lambda link, _: ends in (link.source, link.target), Drop())
        await anyio.sleep(seconds)
        realm.faults.remove(frozen)

    run_with(trouble, expected)


def test_two_standbys_at_once(expected) -> None:
    async def trouble(realm: Realm) -> None:
        realm.seat(Start.STANDBY, key=2)
        realm.seat(Start.STANDBY, key=3)
        await realm.reaches(3)
        await realm.kill_seat(realm.seats[0])

    realm = run_with(trouble, expected)
    assert len([seat for seat in realm.seats[1:] if seat.reigns]) >= 1
    terms = {mark.term for mark, _ in realm.steps}
    assert len(terms) == 2


def test_one_who_starts_where_another_leads_stands_by(expected) -> None:
    async def trouble(realm: Realm) -> None:
        await realm.reaches(2)
        realm.seat(Start.FRESH, key=2)
        realm.seat(Start.RESUME, key=3)

    realm = run_with(trouble, expected)
    assert {mark.term.number for mark, _ in realm.steps} == {1}


@pytest.mark.parametrize("start", [Start.FRESH, Start.RESUME, Start.STANDBY])
@pytest.mark.parametrize("after_s", [0.0, 3.0, 100.0])
def test_a_coordinator_restarts_with_its_key(start: Start, after_s: float, expected) -> None:
    """It learns from the replicas where the run is, whatever it knew itself."""

    async def trouble(realm: Realm) -> None:
        await realm.reaches(3)
        await realm.kill_seat(realm.seats[0])
        await anyio.sleep(after_s)
        realm.seat(start)

    realm = run_with(trouble, expected)
    assert realm.seats[1].reigns[-1].t >= 3
