"""Microbatches go where they are done soonest, also after the world has changed.

A stage is played on virtual time: a window of microbatches in flight, each server working off
its queue one by one. Shares are counted by the replica that did the work. Where service times are
noisy, a share of a few hundred microbatches may be off by one besides the tolerance stated.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping

import pytest

from swarm.core.backoff import Backoff
from swarm.core.ranking import FIRST_GUESS_S
from swarm.core.server import PROBES
from swarm.core.wiring import AWAY, Load, Window, Wiring
from swarm.types import Replica, Stamp, Term

TERM = Term(1, "aa")
A, B, C, D = (Replica(name, "b0") for name in "ABCD")
BASE = {A: 4.0, B: 2.0, C: 1.0}
NOISES = [0.0, 0.2]
BAN_S = 40.0


class Longest(random.Random):
    """Jitter takes nothing off."""

    def random(self) -> float:
        return 1.0


def stamp(n: int) -> Stamp:
    return Stamp(TERM, n)


class Stage:
    """Servers, their queues and the trainer's wiring, on virtual time.

    ``speeds``: microbatches a second; 0 hangs. ``noise``: service times vary by up to this share.
    ``limit_s``: an attempt that is not done by then is closed, and another one made.
    """

    def __init__(
        self,
        speeds: Mapping[Replica, float],
        *,
        noise: float = 0.0,
        seed: int = 0,
        window: int = 12,
        limit_s: float = float("inf"),
    ) -> None:
        self.wiring = Wiring(1, ban=Backoff(first_s=BAN_S))
        self.speeds = dict(speeds)
        self.now = 0.0
        self.sent: list[Replica] = []
        self.done: list[Replica] = []
        self._rng = random.Random(seed)
        self._noise, self._window, self._limit_s = noise, window, limit_s
        self._queues: dict[Replica, deque[Stamp]] = {}
        self._working: set[Replica] = set()
        self._flying: dict[Stamp, float] = {}
        self._events: list[tuple[float, int, Replica, Stamp, float]] = []
        self.wiring.sync(0, self.speeds)

    def change(self, speeds: Mapping[Replica, float]) -> None:
        """From now on: other speeds, newcomers."""
        self.speeds.update(speeds)
        self.wiring.sync(0, self.speeds)
        for replica in self.speeds:
            self._start(replica)

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self._fill()
            self._step()

    def run_more(self, microbatches: int) -> list[Replica]:
        """Who did the next ``microbatches``, in order."""
        start = len(self.done)
        self.run(lambda: len(self.done) >= start + microbatches)
        return self.done[start:]

    def run_until(self, now: float) -> list[Replica]:
        start = len(self.done)
        self.run(lambda: self.now >= now)
        return self.done[start:]

    def _fill(self) -> None:
        for old in [s for s, sent in self._flying.items() if self.now >= sent + self._limit_s]:
            self._close(old)
        while len(self._flying) < self._window:
            new = stamp(len(self.sent) + 1)
            replica = self.wiring.choose(0, new, self.now, self._rng)[0]
            self.sent.append(replica)
            self._flying[new] = self.now
            self._queues.setdefault(replica, deque()).append(new)
            self._start(replica)

    def _close(self, old: Stamp) -> None:
        del self._flying[old]
        self.wiring.closed(old)
        for queue in self._queues.values():
            if old in queue:
                queue.remove(old)

    def _start(self, replica: Replica) -> None:
        queue = self._queues.setdefault(replica, deque())
        if replica in self._working or not queue or not self.speeds[replica]:
            return
        self._working.add(replica)
        next_ = queue.popleft()
        took_s = self._rng.uniform(1 - self._noise, 1 + self._noise) / self.speeds[replica]
        heapq.heappush(self._events, (self.now + took_s, next_.n, replica, next_, took_s))

    def _step(self) -> None:
        self.now, _, replica, did, took_s = heapq.heappop(self._events)
        self._working.discard(replica)
        self.wiring.served(0, did, replica, took_s, self.now)
        if did in self._flying:
            self.done.append(replica)
            self._close(did)
        self._start(replica)


def assert_shares(
    served: list[Replica],
    speeds: Mapping[Replica, float],
    tolerance: float,
    *,
    whole: float = 0.0,
) -> None:
    """Each share is within ``tolerance``, relative, and ``whole`` microbatches of its due."""
    for replica, speed in speeds.items():
        count, fair = served.count(replica), len(served) * speed / sum(speeds.values())
        assert abs(count - fair) <= tolerance * fair + whole, (replica, count, fair)


# -- a stage at work -----------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", range(5))
def test_shares_follow_speeds_over_a_thousand_microbatches(noise: float, seed: int) -> None:
    stage = Stage(BASE, noise=noise, seed=seed)
    assert_shares(stage.run_more(1000), BASE, 0.05)
    assert_shares(stage.sent[:1000], BASE, 0.05)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("who", [A, B, C], ids=["fastest", "middle", "slowest"])
def test_shares_follow_a_change_from_the_twentieth_microbatch_on(
    who: Replica, factor: float, seed: int, noise: float
) -> None:
    stage = Stage(BASE, noise=noise, seed=seed)
    stage.run_more(300 + seed)
    changed = {who: BASE[who] * factor}
    stage.change(changed)
    stage.run_more(20)
    whole = 1.0 if noise else 0.0
    assert_shares(stage.run_more(300), {**BASE, **changed}, 0.1, whole=whole)


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_became_slow_is_sent_fewer_at_once(seed: int) -> None:
    stage = Stage(BASE, noise=0.2, seed=seed)
    stage.run_more(300)
    stage.change({A: 1.0})
    sent = len(stage.sent)
    stage.run_more(400)
    assert_shares(stage.sent[sent + 20 : sent + 320], {A: 1.0, B: 2.0, C: 1.0}, 0.1)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("speed", [16.0, 4.0, 2.0, 1.0, 0.5, 0.25])
def test_a_newcomer_is_neither_starved_nor_flooded(speed: float, seed: int, noise: float) -> None:
    stage = Stage(BASE, noise=noise, seed=seed)
    stage.run_more(300 + seed)
    sent = len(stage.sent)
    stage.change({D: speed})
    stage.run_more(100)
    fair = 50 * speed / (sum(BASE.values()) + speed)
    assert fair / 2 <= stage.sent[sent : sent + 50].count(D) <= 2 * fair


@pytest.mark.parametrize("who", [A, B, C], ids=["fastest", "middle", "slowest"])
def test_a_hung_replica_is_given_almost_nothing_and_is_not_flooded_when_it_returns(
    who: Replica,
) -> None:
    stage = Stage(BASE, noise=0.1, limit_s=10.0)
    stage.run_until(40.0)
    sent = len(stage.sent)
    stage.change({who: 0.0})
    hung = stage.run_until(90.0)
    assert stage.sent[sent:].count(who) <= 8, "those before it was noticed, then one a limit"
    assert_shares([r for r in hung if r != who], {r: v for r, v in BASE.items() if r != who}, 0.1)
    stage.change(BASE)
    stage.run_until(91.0)
    assert_shares(stage.run_more(140), BASE, 0.1)


@pytest.mark.parametrize("noise", NOISES)
def test_a_newcomer_that_never_answers_gets_only_a_few(noise: float) -> None:
    stage = Stage(BASE, noise=noise)
    stage.run_more(100)
    stage.change({D: 0.0})
    stage.run_more(200)
    assert stage.sent.count(D) == PROBES


def test_a_banned_replica_comes_back_and_does_not_make_up_for_the_ban() -> None:
    stage = Stage(BASE, window=1)
    stage.run_more(100)
    stage.wiring.ban(A, stage.now, Longest())
    sent, banned_at = len(stage.sent), stage.now
    stage.run_until(banned_at + BAN_S - 1.0)
    assert A not in stage.sent[sent:]
    stage.run_until(banned_at + BAN_S)
    assert_shares(stage.run_more(140), BASE, 0.1)


# -- rules ---------------------------------------------------------------------------------------


@pytest.fixture
def wiring() -> Wiring:
    return Wiring(2, ban=Backoff(first_s=BAN_S))


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def measured(wiring: Wiring, speeds: Mapping[Replica, float], *, stage: int = 0) -> None:
    """Each replica of ``speeds`` has done one microbatch at time 0."""
    wiring.sync(stage, speeds)
    for n, (replica, speed) in enumerate(speeds.items()):
        wiring.served(stage, stamp(10_000 + n), replica, 1 / speed, 0.0)


def load(wiring: Wiring, replica: Replica, stage: int = 0) -> Load:
    return next(found for found in wiring.loads(stage) if found.replica == replica)


def test_a_stage_without_replicas_offers_nobody(wiring: Wiring, rng: random.Random) -> None:
    assert wiring.choose(0, stamp(1), 0.0, rng) == ()
    assert wiring.loads(0) == []


def test_a_short_list_has_the_best_first_and_no_more_than_asked(
    wiring: Wiring, rng: random.Random
) -> None:
    measured(wiring, {A: 1.0, B: 5.0, C: 2.0, D: 0.5})
    assert wiring.choose(0, stamp(1), 0.0, rng) == (B, C, A)
    assert wiring.choose(0, stamp(2), 0.0, rng, most=2) == (B, C)


def test_equal_replicas_are_drawn_by_the_seed(wiring: Wiring) -> None:
    wiring.sync(0, [A, B, C])
    firsts = set()
    for seed in range(20):
        firsts.add(wiring.choose(0, stamp(1), 0.0, random.Random(seed))[0])
        wiring.closed(stamp(1))
    assert firsts == {A, B, C}


def test_stages_are_apart(wiring: Wiring, rng: random.Random) -> None:
    wiring.sync(0, [A])
    wiring.sync(1, [B])
    assert wiring.choose(0, stamp(1), 0.0, rng) == (A,)
    assert wiring.choose(1, stamp(1), 0.0, rng) == (B,)


def test_the_first_choice_owes_the_attempt_until_it_is_over(
    wiring: Wiring, rng: random.Random
) -> None:
    wiring.sync(0, [A])
    wiring.choose(0, stamp(1), 0.0, rng)
    wiring.choose(0, stamp(2), 0.0, rng)
    assert load(wiring, A) == Load(A, None, 2, 0)
    wiring.served(0, stamp(1), A, 0.5, 0.5)
    assert load(wiring, A) == Load(A, 0.5, 1, 1)
    wiring.closed(stamp(2))
    assert load(wiring, A) == Load(A, 0.5, 0, 1)


def test_if_another_took_the_attempt_it_is_expected_of_that_one(
    wiring: Wiring, rng: random.Random
) -> None:
    measured(wiring, {A: 2.0, B: 1.0})
    assert wiring.choose(0, stamp(1), 0.0, rng)[0] == A
    wiring.accepted(0, stamp(1), B, 0.1)
    assert (load(wiring, A).outstanding, load(wiring, B).outstanding) == (0, 1)
    wiring.accepted(0, stamp(1), B, 0.2)
    assert load(wiring, B).outstanding == 1


def test_who_was_too_busy_for_its_only_attempt_has_not_been_quiet_since(
    wiring: Wiring,
) -> None:
    measured(wiring, {A: 1.0, B: 1.0})
    rng = random.Random(1)
    for n, replica in ((1, A), (2, B)):
        wiring.choose(0, stamp(n), 0.0, rng)
        wiring.served(0, stamp(n), replica, 1.0, 1.0)
    first, second = wiring.choose(0, stamp(3), 1.0, rng)
    wiring.served(0, stamp(3), second, 1.0, 2.0)
    wiring.served(0, stamp(4), first, 1.0, 2.0)
    firsts = [wiring.choose(0, stamp(n), 1000.0, rng)[0] for n in range(5, 15)]
    assert (firsts.count(A), firsts.count(B)) == (5, 5)


def test_who_is_quiet_stays_so_when_another_takes_the_next_attempt(
    wiring: Wiring, rng: random.Random
) -> None:
    measured(wiring, {A: 4.0, B: 1.0})
    assert wiring.choose(0, stamp(1), 0.0, rng)[0] == A
    wiring.served(0, stamp(1), A, 0.25, 0.25)
    assert wiring.choose(0, stamp(2), 0.25, rng)[0] == A
    wiring.closed(stamp(2))
    for n in (3, 13):
        firsts = [wiring.choose(0, stamp(k), 10.0, rng)[0] for k in range(n, n + 10)]
        assert firsts.count(A) == 1, "one, to see whether it lives"
        wiring.accepted(0, stamp(n + firsts.index(A)), B, 10.0)


def test_a_late_receipt_of_an_attempt_that_is_over_is_expected_of_nobody(
    wiring: Wiring, rng: random.Random
) -> None:
    wiring.sync(0, [A])
    wiring.choose(0, stamp(1), 0.0, rng)
    wiring.closed(stamp(1))
    wiring.accepted(0, stamp(1), A, 1.0)
    assert load(wiring, A) == Load(A, None, 0, 0)


def test_late_work_counts_as_work(wiring: Wiring, rng: random.Random) -> None:
    measured(wiring, {A: 2.0, B: 2.0})
    wiring.served(0, stamp(1), A, 0.5, 1.0)
    assert load(wiring, A) == Load(A, 0.5, 0, 2)
    assert wiring.choose(0, stamp(2), 1.0, rng)[0] == B


def test_what_a_stranger_says_changes_nothing(wiring: Wiring, rng: random.Random) -> None:
    wiring.sync(0, [A])
    wiring.choose(0, stamp(1), 0.0, rng)
    wiring.accepted(0, stamp(1), D, 0.1)
    wiring.served(0, stamp(1), D, 0.1, 0.1)
    assert wiring.loads(0) == [Load(A, None, 1, 0)]


def test_the_gone_are_not_chosen_and_owe_nothing_when_they_return(
    wiring: Wiring, rng: random.Random
) -> None:
    measured(wiring, {A: 4.0, B: 1.0})
    served = load(wiring, A).served
    wiring.choose(0, stamp(1), 0.0, rng, shun=frozenset({B}))
    assert load(wiring, A).outstanding == 1
    wiring.sync(0, [B])
    assert wiring.choose(0, stamp(2), 0.0, rng) == (B,)
    wiring.sync(0, [A, B])
    assert load(wiring, A) == Load(A, 1 / 4, 0, served)


def test_whoever_leaves_one_stage_still_owes_another(wiring: Wiring, rng: random.Random) -> None:
    wiring.sync(0, [A])
    wiring.sync(1, [B])
    for stage in (0, 1):
        wiring.choose(stage, stamp(1), 0.0, rng)
    wiring.sync(0, [])
    wiring.sync(0, [A])
    assert load(wiring, A).outstanding == 0
    assert load(wiring, B, 1).outstanding == 1
    wiring.closed(stamp(1))
    assert load(wiring, B, 1).outstanding == 0


def test_who_serves_is_looked_at_again_unless_it_is_the_same_tuple(
    wiring: Wiring, rng: random.Random
) -> None:
    stages = ((A,), (B,))
    assert wiring.serve(stages)
    assert not wiring.serve(stages)
    wiring.sync(0, [C])
    assert wiring.serve(stages), "somebody else said otherwise meanwhile"
    assert wiring.choose(0, stamp(1), 0.0, rng) == (A,)
    lists = [[A], [B]]
    wiring.serve(lists)
    lists[0].append(C)
    assert wiring.serve(lists)
    assert set(wiring.choose(0, stamp(2), 0.0, rng)) == {A, C}


def test_a_fresh_announcement_ends_a_ban(wiring: Wiring, rng: random.Random) -> None:
    wiring.sync(0, [A, B])
    wiring.ban(A, 0.0, rng)
    wiring.sync(0, [B])
    wiring.sync(0, [A, B])
    assert set(wiring.choose(0, stamp(1), 0.0, rng)) == {A, B}


def test_success_ends_a_ban(wiring: Wiring, rng: random.Random) -> None:
    wiring.sync(0, [A, B])
    wiring.ban(A, 0.0, rng)
    assert wiring.choose(0, stamp(1), 0.0, rng) == (B,)
    wiring.served(0, stamp(9), A, 1.0, 0.1)
    assert set(wiring.choose(0, stamp(2), 0.1, rng)) == {A, B}


def test_the_last_replica_of_a_stage_is_never_left_out(wiring: Wiring, rng: random.Random) -> None:
    wiring.sync(0, [A])
    wiring.ban(A, 0.0, rng)
    assert wiring.choose(0, stamp(1), 0.1, rng) == (A,)
    wiring.sync(0, [A, B])
    wiring.ban(B, 0.0, rng)
    assert set(wiring.choose(0, stamp(2), 0.1, rng)) == {A, B}


def test_the_shunned_are_chosen_only_if_nobody_else_is_there(
    wiring: Wiring, rng: random.Random
) -> None:
    measured(wiring, {A: 4.0, B: 1.0})
    assert wiring.choose(0, stamp(1), 0.0, rng, shun=frozenset({A})) == (B, A)
    wiring.sync(0, [A])
    assert wiring.choose(0, stamp(2), 0.0, rng, shun=frozenset({A})) == (A,)


def test_expected_time_is_measured_else_the_median_else_a_guess(wiring: Wiring) -> None:
    wiring.sync(0, [A])
    assert wiring.expected_s(0, A) == FIRST_GUESS_S
    assert wiring.expected_s(0, D) == FIRST_GUESS_S
    measured(wiring, {A: 4.0, B: 2.0, C: 1.0, D: 1.0})
    wiring.sync(0, [A, B, C])
    assert wiring.expected_s(0, A) == 0.25
    assert wiring.expected_s(0, D) == 0.5


def test_after_evaluations_nobody_counts_as_quiet(wiring: Wiring, rng: random.Random) -> None:
    """They are begun and closed, but no stage ever finishes one."""
    measured(wiring, {A: 1.0, B: 1.0})
    for n, replica in ((1, A), (2, B)):
        wiring.choose(0, stamp(n), 0.0, rng)
        wiring.served(0, stamp(n), replica, 1.0, 1.0)
    wiring.choose(0, stamp(3), 1.0, rng)
    wiring.accepted(0, stamp(3), A, 1.5)
    wiring.closed(stamp(3))
    firsts = [wiring.choose(0, stamp(n), 1000.0, rng)[0] for n in range(4, 14)]
    assert (firsts.count(A), firsts.count(B)) == (5, 5)


# -- the window ----------------------------------------------------------------------------------


def test_a_window_grows_by_one_for_each_windowful_of_successes() -> None:
    window = Window(4, least=1, most=100)
    for _ in range(5):
        window.succeeded()
    assert window.size == 5
    for _ in range(100):
        window.succeeded()
    assert 13 <= window.size <= 15


def test_a_window_doubles_with_each_trip_until_trips_wait_in_queues() -> None:
    window = Window(4, least=1, most=1000)
    for _ in range(4):
        window.succeeded(1.0)
    assert window.size == 8
    for _ in range(8):
        window.succeeded(1.9)
    assert window.size == 16
    window.succeeded(2.1)
    for _ in range(16):
        window.succeeded(1.0)
    assert window.size == 17


def test_a_window_no_longer_doubles_once_a_replica_was_busy() -> None:
    window = Window(20, least=1, most=1000)
    window.busy()
    for _ in range(12):
        window.succeeded(1.0)
    assert window.size == 18


def test_a_window_stays_within_its_bounds() -> None:
    window = Window(4, least=3, most=5)
    for _ in range(50):
        window.succeeded()
    assert window.size == 5
    for _ in range(10):
        window.busy()
        for _ in range(2 * window.size):
            window.busy()
        assert window.size >= 3
        for _ in range(3):
            window.succeeded()


def test_busy_answers_narrow_the_window_at_once_but_once_a_windowful() -> None:
    window = Window(20, least=1, most=100)
    for _ in range(30):
        window.busy()
    assert window.size == 18
    for _ in range(17):
        window.succeeded()
    window.busy()
    assert window.size == 18
    for _ in range(2):
        window.succeeded()
    window.busy()
    assert window.size == 17


def test_a_window_never_closes() -> None:
    window = Window(2, least=1, most=8)
    for _ in range(20):
        window.busy()
        window.succeeded()
        window.succeeded()
        assert window.size >= 1


def test_a_replica_that_was_away_is_known_when_it_is_back_and_makes_nothing_up() -> None:
    wiring = Wiring(1, ban=Backoff(1.0))
    rng = random.Random(0)
    fast, slow = Replica("fast", "1"), Replica("slow", "1")
    wiring.sync(0, [fast, slow])
    for n in range(1, 41):
        stamp = Stamp(Term(1, "t"), n)
        chosen = wiring.choose(0, stamp, float(n), rng)[0]
        wiring.served(0, stamp, chosen, 1.0 if chosen == fast else 4.0, float(n))
    wiring.sync(0, [slow])
    for n in range(41, 81):
        stamp = Stamp(Term(1, "t"), n)
        assert wiring.choose(0, stamp, float(n), rng) == (slow,)
        wiring.served(0, stamp, slow, 4.0, float(n))
    wiring.sync(0, [fast, slow])
    assert wiring.expected_s(0, fast) == pytest.approx(1.0)
    chosen = []
    for n in range(81, 131):
        stamp = Stamp(Term(1, "t"), n)
        chosen.append(wiring.choose(0, stamp, float(n), rng)[0])
        wiring.served(0, stamp, chosen[-1], 1.0 if chosen[-1] == fast else 4.0, float(n))
    assert chosen.count(slow) == pytest.approx(10, abs=2)


def test_only_so_many_that_are_away_are_remembered() -> None:
    wiring = Wiring(1, ban=Backoff(1.0))
    many = [Replica(f"r{n}", "1") for n in range(AWAY + 2)]
    wiring.sync(0, many)
    for n, replica in enumerate(many):
        wiring.served(0, Stamp(Term(1, "t"), n + 1), replica, 3.0, 1.0)
    stamp = Stamp(Term(1, "t"), 999)
    wiring.choose(0, stamp, 1.0, random.Random(0))
    wiring.served(0, stamp, many[-1], 3.0, 2.0)
    wiring.sync(0, [])
    wiring.sync(0, many)
    assert len(wiring.loads(0)) == AWAY + 2


@pytest.mark.parametrize(
    ("replicas", "microbatches", "limit", "size", "most"),
    [(6, 64, 0, 12, 64), (1, 64, 0, 6, 64), (6, 8, 0, 8, 8), (6, 64, 5, 5, 5), (6, 4, 9, 4, 4)],
)
def test_a_window_begins_with_two_for_each_replica_unless_it_is_limited(
    replicas: int, microbatches: int, limit: int, size: int, most: int
) -> None:
    window = Window.sized(3, replicas, microbatches, limit)
    assert window.size == size
    for _ in range(500):
        window.succeeded(1.0)
    assert window.size == most
