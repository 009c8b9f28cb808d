"""When a standby may take over."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.lease import Verdict, Watch
from swarm.types import Replica

LEASE_S, PATIENCE_S, LOOK_S = 15.0, 60.0, 5.0
STAGES = 2
ALL = [Replica(f"{stage}-{n}", "1") for stage in range(STAGES) for n in range(3)]
A0, A1, A2, B0, B1, B2 = ALL
LONG = LEASE_S + 1


def watch() -> Watch:
    return Watch(STAGES, LEASE_S, PATIENCE_S)


def quiet(*replicas: Replica, for_s: float = LONG) -> dict[Replica, tuple[int, float]]:
    return {replica: (int(replica.peer[0]), for_s) for replica in replicas}


def look(
    watch: Watch, reached: dict[Replica, tuple[int, float]], *, start: float, end: float
) -> list[Verdict]:
    """Look every ``LOOK_S`` from ``start`` to before ``end``; the directory shows all."""
    count = int((end - start) / LOOK_S)
    return [watch.looked(reached, ALL, start + n * LOOK_S) for n in range(count)]


def test_it_takes_over_at_once_when_all_it_reaches_have_waited_longer_than_the_lease() -> None:
    verdict = watch().looked(quiet(*ALL), ALL, 1000.0)
    assert verdict == Verdict(True, "no replica has heard a trainer for 16 s", 0.0)


def test_half_of_the_announced_are_enough_if_they_have_all_stages() -> None:
    assert watch().looked(quiet(A0, A1, B0), ALL, 0.0).may


def test_the_lease_itself_is_not_longer_than_the_lease() -> None:
    assert not watch().looked(quiet(*ALL, for_s=LEASE_S), ALL, 0.0).may


def test_one_that_hears_the_trainer_is_believed_against_all_others() -> None:
    verdict = watch().looked(quiet(*ALL) | quiet(B1, for_s=3.0), ALL, 0.0)
    assert verdict == Verdict(False, "1-1 heard a trainer 3 s ago", LEASE_S - 3.0)


def test_a_replica_cut_off_from_the_trainer_alone_never_leads_to_a_takeover() -> None:
    watching = watch()
    for n in range(100):
        reached = quiet(A0, for_s=LONG + n * LOOK_S) | quiet(A1, for_s=n % 4)
        assert not watching.looked(reached, ALL, n * LOOK_S).may


@pytest.mark.parametrize(
    ("reached", "reason"),
    [
        ((), "no replica that has heard a trainer is reached"),
        ((A0, B0), "only 2 of 6 replicas are reached"),
        ((A0, A1, A2), "no replica of stage 1 is reached"),
    ],
)
def test_where_few_are_reached_it_waits_for_the_patience(
    reached: tuple[Replica, ...], reason: str
) -> None:
    watching = watch()
    first, *others = look(watching, quiet(*reached), start=1000.0, end=1000.0 + PATIENCE_S)
    more = "; a trainer may live out of reach, so 60 s more to wait"
    assert first == Verdict(False, reason + more, PATIENCE_S)
    assert [v.in_s for v in others] == [PATIENCE_S - LOOK_S * (n + 1) for n in range(len(others))]
    assert not any(verdict.may for verdict in others)
    last = watching.looked(quiet(*reached), ALL, 1000.0 + PATIENCE_S)
    assert last == Verdict(True, f"{reason}, and no trainer was heard of for 60 s", 0.0)


def test_the_patience_begins_anew_when_anybody_has_heard_the_trainer() -> None:
    watching = watch()
    look(watching, quiet(A0), start=0.0, end=55.0)
    verdict = watching.looked(quiet(A0, for_s=2.0), ALL, 55.0)
    assert verdict.in_s == PATIENCE_S, "the lease is over sooner, but few are reached"
    assert not any(v.may for v in look(watching, quiet(A0), start=60.0, end=55.0 + PATIENCE_S))
    assert watching.looked(quiet(A0), ALL, 55.0 + PATIENCE_S).may


def test_how_long_few_have_heard_nothing_does_not_shorten_the_patience() -> None:
    assert not watch().looked(quiet(A0, for_s=1000.0), ALL, 0.0).may


def test_those_last_announced_are_remembered_when_their_records_expire() -> None:
    watching = watch()
    watching.looked(quiet(*ALL, for_s=1.0), ALL, 0.0)
    side = [A0, B0]
    times = [float(t) for t in range(5, 60, 5)]
    assert not any(watching.looked(quiet(*side), side, t).may for t in times)


def test_the_remembered_are_forgotten_after_the_patience() -> None:
    watching = watch()
    side = [A0, B0]
    watching.looked(quiet(*ALL, for_s=1.0), ALL, 0.0)
    watching.looked(quiet(*side, for_s=1.0), side, 50.0)
    assert not watching.looked(quiet(*side), side, 60.0).may
    assert watching.looked(quiet(*side), side, 61.0).may


def test_one_that_is_reached_counts_as_announced() -> None:
    assert not watch().looked(quiet(A0, B0), [A1, A2, B1, B2], 0.0).may, "2 of 6"


def test_a_peer_counts_once_whatever_its_boots() -> None:
    again = Replica("0-0", "2")
    reached = quiet(A0, again, B0)
    assert not watch().looked(reached, [A0, A1, A2, B1, B2], 0.0).may, "2 of 6"
    assert watch().looked(reached, [A0, again, A1, B1], 0.0).may, "2 of 4"


@pytest.mark.parametrize("nonsense", [(0, inf), (0, nan), (0, -1.0), (-1, 1.0), (STAGES, 1.0)])
def test_who_never_heard_a_trainer_or_talks_nonsense_is_no_witness(
    nonsense: tuple[int, float],
) -> None:
    assert watch().looked(quiet(A1, A2, B0, B1) | {A0: nonsense}, ALL, 0.0).may
    alone = watch().looked({A0: nonsense}, [A0], 0.0)
    assert not alone.may
    assert alone.reason.startswith("no replica that has heard a trainer is reached")


def test_a_standby_that_was_frozen_has_not_been_waiting() -> None:
    watching = watch()
    watching.looked(quiet(*ALL, for_s=1.0), ALL, 0.0)
    verdict = watching.looked({}, [], 1000.0)
    assert not verdict.may
    assert verdict.in_s == 0.75 * PATIENCE_S
    assert [watching.looked({}, [], 2000.0 + n * 1000).may for n in range(3)] == [
        False,
        False,
        True,
    ]


LOOKS = st.lists(
    st.tuples(
        st.floats(0.0, 30.0),
        st.dictionaries(st.sampled_from(ALL), st.floats(0.0, 100.0)),
        st.sets(st.sampled_from(ALL)),
    ),
    max_size=20,
)


@settings(deadline=None, derandomize=True)
@given(LOOKS)
def test_it_takes_over_only_from_a_trainer_that_nobody_reached_has_heard(
    looks: list[tuple[float, dict[Replica, float], set[Replica]]],
) -> None:
    watching, now, alive_at = watch(), 0.0, None
    for gap_s, quiets, announced in looks:
        now += gap_s
        reached = {r: (int(r.peer[0]), quiet_s) for r, quiet_s in quiets.items()}
        verdict = watching.looked(reached, announced, now)
        heard = any(quiet_s <= LEASE_S for quiet_s in quiets.values())
        alive_at = now if heard or alive_at is None else alive_at
        enough = 2 * len(reached) >= len(announced | set(reached)) and len(
            {stage for stage, _ in reached.values()}
        ) == len(range(STAGES))
        assert not (verdict.may and heard)
        assert not verdict.may or enough or now - alive_at >= PATIENCE_S - 1e-6
        assert verdict.may == (verdict.in_s == 0.0) or heard
        assert verdict.in_s >= 0.0
