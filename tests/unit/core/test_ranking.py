"""The ranking of a stage agrees with the plain rule, computed for everybody, and does less."""

from __future__ import annotations

import random

import pytest

from swarm.core.ranking import FIRST_GUESS_S, Ranking
from swarm.core.server import HUNG, PROBING, SHUNNED, Debt, Server
from swarm.types import Replica, Stamp, Term

NOBODY: frozenset[Replica] = frozenset()


class Looks(Server):
    """Counts how often the ranking looks at any server."""

    count = 0

    def slowdown(self, now: float) -> float:
        Looks.count += 1
        return super().slowdown(now)

    def priority(self, expected_s: float, slowdown: float = 1.0) -> float:
        Looks.count += 1
        return super().priority(expected_s, slowdown)

    def hung_at(self) -> float:
        Looks.count += 1
        return super().hung_at()


class Stage:
    """A ranking, and what befalls its servers."""

    def __init__(self, seed: int, replicas: int, server: type[Server] = Server) -> None:
        self.rng, self.ranking, self.now = random.Random(seed), Ranking(), 0.0
        self.banned: set[Replica] = set()
        self.owed: list[Debt] = []
        self.gone: list[Server] = []
        for n in range(replicas):
            self.ranking.enter(server(Replica(f"r{n}", "boot")))

    def choose(self, shun: frozenset[Replica] = NOBODY) -> list[Server]:
        ranking, banned = self.ranking, self.banned.__contains__ if self.banned else None
        return ranking.choose(self.now, self.rng, banned, shun=shun, most=3)

    def give(self, server: Server) -> None:
        debt = Debt(Stamp(Term(1, "t"), 1), self.now, server)
        server.give(debt, self.now)
        self.ranking.touch(server)
        self.owed.append(debt)

    def serve(self, took_s: float) -> None:
        debt = self.owed.pop(self.rng.randrange(len(self.owed)))
        if debt in debt.server.debts:
            debt.server.debts.remove(debt)
            self.ranking.done(debt.server, took_s, self.now)

    def ban(self, server: Server) -> None:
        self.banned ^= {server.replica}
        self.ranking.touch(server)

    def befall(self) -> None:
        rng, servers = self.rng, list(self.ranking.servers.values())
        match rng.randrange(20):
            case 0:
                self.ban(rng.choice(servers))
            case 1 if len(servers) > 1:
                self.gone.append(self.ranking.leave(rng.choice(servers).replica))
            case 2 if self.gone:
                self.ranking.enter(self.gone.pop())
            case 3:
                self.now += rng.choice((1.0, 10.0, 40.0))
            case _ if self.owed:
                self.serve(rng.choice((0.5, 1.0, 3.0)))
        self.now += rng.uniform(0.0, 0.5)


def plain(stage: Stage, shun: frozenset[Replica]) -> list[tuple[int, float]]:
    """What the three best have, by going over everybody."""
    ranking, now = stage.ranking, stage.now
    servers = list(ranking.servers.values())
    allowed = [s for s in servers if s.replica not in stage.banned] or servers
    return sorted(worth(ranking, server, now, shun) for server in allowed)[:3]


def worth(
    ranking: Ranking, server: Server, now: float, shun: frozenset[Replica]
) -> tuple[int, float]:
    expected_s = ranking.expected_s(server)
    tier = server.tier + (SHUNNED if server.replica in shun else 0)
    return tier, server.priority(expected_s, server.slowdown(now))


@pytest.mark.parametrize("replicas", [1, 4, 12])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_are_those_that_the_plain_rule_finds(seed: int, replicas: int) -> None:
    stage = Stage(seed, replicas)
    for _ in range(600):
        someone = stage.rng.choice(list(stage.ranking.servers))
        shun = frozenset({someone}) if stage.rng.random() < 0.1 else NOBODY
        best = stage.choose(shun)
        assert [worth(stage.ranking, s, stage.now, shun) for s in best] == plain(stage, shun)
        stage.give(best[0])
        stage.befall()


@pytest.mark.parametrize("seed", range(4))
def test_the_floor_is_the_least_of_those_that_go_on_and_the_others_are_lifted_to_it(
    seed: int,
) -> None:
    stage = Stage(seed, 8)
    for _ in range(600):
        best = stage.choose()
        ranking = stage.ranking
        servers = list(ranking.servers.values())
        allowed = [s for s in servers if s.replica not in stage.banned] or servers
        going = [s for s in allowed if s.slowdown(stage.now) < HUNG] or allowed
        least = [s.priority(ranking.expected_s(s)) for s in servers]
        assert ranking.floor == min(s.priority(ranking.expected_s(s)) for s in going)
        assert min(least) == pytest.approx(ranking.floor)
        stage.give(best[0])
        stage.befall()


def test_a_choice_looks_at_a_few_of_a_thousand() -> None:
    stage = Stage(0, 500, Looks)
    for server in list(stage.ranking.servers.values()):
        stage.ranking.done(server, stage.rng.uniform(0.5, 3.0), stage.now)
    stage.choose()
    Looks.count = 0
    for _ in range(1000):
        stage.give(stage.choose()[0])
        if len(stage.owed) > 250:
            stage.serve(stage.rng.uniform(0.5, 3.0))
        stage.now += 0.001
    assert Looks.count < 1000 * 20, "going over all would be half a million, at the least"


def test_equals_are_drawn_by_lot() -> None:
    firsts = {Stage(seed, 3).choose()[0].replica.peer for seed in range(20)}
    assert firsts == {"r0", "r1", "r2"}


def test_the_median_of_the_measured_is_expected_of_the_others() -> None:
    stage = Stage(0, 4)
    servers = list(stage.ranking.servers.values())
    assert stage.ranking.guess_s() == FIRST_GUESS_S
    for server, took_s in zip(servers, (4.0, 1.0, 2.0), strict=False):
        stage.ranking.done(server, took_s, 0.0)
    assert stage.ranking.guess_s() == 2.0
    assert stage.ranking.expected_s(servers[3]) == 2.0
    stage.ranking.leave(servers[0].replica)
    assert stage.ranking.guess_s() == 1.5


def test_a_newcomer_under_probe_waits_behind_the_others() -> None:
    stage = Stage(0, 2)
    first, second = stage.choose()
    stage.give(first)
    stage.give(first)
    assert first.tier == PROBING
    stage.ranking.done(second, 100.0, 0.0)
    assert stage.choose() == [second, first]
    assert stage.ranking.floor == 100.0, "two of the median are expected of the other"
