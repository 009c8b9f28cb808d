"""Who is due next, with times that move on, and without looking at everybody."""

from __future__ import annotations

import random

from swarm.core.alarms import Alarms

NEVER = float("inf")


class Times(dict[int, float]):
    """When each is due; ``asked`` counts how often somebody wanted to know."""

    asked = 0

    def when(self, key: int) -> float:
        self.asked += 1
        return self[key]


def alarms(times: Times) -> Alarms[int]:
    made = Alarms(times.when)
    for key, time in times.items():
        made.at(key, time)
    return made


def test_whatever_is_due_is_called_for_once_in_order_of_time() -> None:
    found = alarms(Times({1: 5.0, 2: 3.0, 3: 9.0}))
    assert found.next() == 3.0
    assert found.due(2.9) == []
    assert found.due(5.0) == [2, 1]
    assert found.due(5.0) == []
    assert found.next() == 9.0


def test_a_time_that_moved_on_is_found_without_being_told() -> None:
    times = Times({1: 1.0, 2: 2.0, 3: 3.0})
    found = alarms(times)
    times[1], times[2] = 7.0, NEVER
    assert found.due(2.5) == []
    assert found.next() == 3.0
    assert found.due(7.0) == [3, 1]
    assert found.next() == NEVER


def test_an_earlier_time_is_told_and_the_later_one_is_void() -> None:
    times = Times({1: 5.0})
    found = alarms(times)
    times[1] = 2.0
    found.at(1, 2.0)
    assert found.next() == 2.0
    assert found.due(9.0) == [1]
    assert found.due(9.0) == []


def test_the_forgotten_are_never_due() -> None:
    found = alarms(Times({1: 1.0, 2: 2.0}))
    found.forget(1)
    found.forget(1)
    assert found.next() == 2.0
    assert found.due(9.0) == [2]


def test_many_that_move_on_often_are_not_looked_at_each_time() -> None:
    rng = random.Random(0)
    times = Times({key: 1000.0 for key in range(1000)})
    found = alarms(times)
    for n in range(10_000):
        times[rng.randrange(1000)] += 1.0
        if n % 100 == 0:
            assert found.next() == min(times.values())
    assert times.asked < 10_000, "100 looks at 1000 would be ten times as many"
