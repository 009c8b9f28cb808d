"""Pushes in turn: as many under way as keep a link full, on links made of arithmetic."""

from __future__ import annotations

import heapq

import pytest

from swarm.core.link import LATELY, LEAST, Link

MB = 1 << 20


class Pipe:
    """A link of ``rate`` bytes a second: what is sent is carried in order, and answered
    ``trip_s`` (there and back) after its last byte has passed."""

    def __init__(self, rate: float, trip_s: float) -> None:
        self.rate, self.trip_s = rate, trip_s
        self.free_at = self.now = 0.0
        self.most = 0
        """Pushes that were under way at a time, at most, since it was set."""

    def carry(self, link: Link, pushes: int, nbytes: int) -> float:
        """Seconds until ``pushes``, all there at once, have been answered."""
        began, ends, left, number = self.now, [], pushes, 0
        while left or ends:
            while left and link.may_start():
                self.free_at = max(self.free_at, self.now) + nbytes / self.rate
                turn = link.start(nbytes, self.now)
                heapq.heappush(ends, (self.free_at + self.trip_s, number, turn))
                left, number = left - 1, number + 1
                self.most = max(self.most, len(ends))
            self.now, _, turn = heapq.heappop(ends)
            link.end(turn, self.now, arrived=True)
        return self.now - began


@pytest.mark.parametrize(
    ("rate", "trip_s", "nbytes"),
    [
        (12.5e6, 0.1, MB),  # 100 Mb/s: a little more than one activation is on its way
        (12.5e6, 0.1, MB // 16),
        (125e6, 0.2, MB),
        (1e6, 0.001, MB),
        (1e9, 0.0002, MB),
    ],
)
def test_a_link_is_kept_full_and_not_fuller(rate: float, trip_s: float, nbytes: int):
    link, pipe = Link(), Pipe(rate, trip_s)
    pipe.carry(link, 300, nbytes)  # it has found its size
    pipe.most = 0
    took_s = pipe.carry(link, 300, nbytes)
    assert took_s < 1.05 * (300 * nbytes / rate + trip_s)
    fits = trip_s * rate / nbytes + 1
    assert pipe.most <= max(LEAST, 1.5 * fits + 1)


def test_the_size_is_found_in_few_round_trips():
    pipe = Pipe(12.5e6, 0.1)
    took_s = pipe.carry(Link(), 200, MB // 16)  # twenty of these are on their way, if it is full
    assert took_s < 200 * MB / 16 / 12.5e6 + 8 * 0.1


def test_a_link_that_becomes_faster_or_slower_is_followed():
    link, pipe = Link(), Pipe(12.5e6, 0.1)
    pipe.carry(link, 100, MB // 16)
    pipe.rate = 50e6
    pipe.carry(link, 600, MB // 16)
    assert pipe.carry(link, 300, MB // 16) < 1.15 * (300 * MB / 16 / 50e6 + 0.1)
    pipe.rate = 6.25e6
    pipe.carry(link, LATELY, MB // 16)
    pipe.most = 0
    pipe.carry(link, 100, MB // 16)
    assert pipe.most <= 25


def test_two_may_always_be_under_way():
    link = Link()
    link.start(MB, 0.0)
    assert link.may_start()
    link.start(MB, 0.0)
    assert not link.may_start()


def test_nobody_waits_for_a_peer_that_does_not_answer():
    link = Link()
    turns = [link.start(MB, 0.0) for _ in range(LEAST)]
    assert not link.may_start()
    link.end(turns[0], 5.0, arrived=False)
    assert all(link.may_start() and link.start(MB, 5.0) for _ in range(50))
    link.end(turns[1], 6.0, arrived=True)  # it is back
    assert not link.may_start()


def test_a_push_that_takes_no_time_tells_nothing():
    link = Link()
    link.end(link.start(MB, 1.0), 1.0, arrived=True)
    assert link.room_bytes == 0.0
    link.end(link.start(MB, 1.0), 2.0, arrived=True)
    assert link.room_bytes == pytest.approx(2 * MB)
