"""A node that is to be nice: what it takes for others' work, and that it pauses for it."""

from __future__ import annotations

import os

import anyio
import psutil
import pytest
import trio
import trio.testing

from peers import courtesy
from peers.courtesy import LOOK_S, Others, be_nice
from swarm.core.caps import Courtesy


def test_others_are_what_is_neither_idle_nor_our_own(monkeypatch):
    others = Others()
    monkeypatch.setattr(others, "_at", (100.0, 50.0))
    monkeypatch.setattr(others, "_own", 10.0)
    monkeypatch.setattr(others, "_now", lambda: (120.0, 55.0))
    monkeypatch.setattr(others, "_own_s", lambda: 19.0)
    assert others.look() == pytest.approx((20 - 5 - 9) / 20)
    assert others.look() == 0.0, "no time has passed"


def test_a_real_machine_gives_a_share():
    others = Others()
    assert 0.0 <= others.look() <= 1.0
    assert others._own_s() > 0
    assert psutil.Process().pid == os.getpid()


def test_it_pauses_while_others_work_and_says_why(monkeypatch):
    busy = [0.9] * 8 + [0.0] * 20
    niced: list[int] = []
    monkeypatch.setattr(courtesy.os, "nice", niced.append)
    monkeypatch.setattr(Others, "look", lambda _: busy.pop(0))
    pauses: list[bool] = []
    said: list[str] = []

    async def main() -> None:
        with anyio.move_on_after(LOOK_S * 27):
            await be_nice(pauses.append, said.append)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert niced == [19]
    assert pauses == [True, False]
    assert said == [
        "pauses: other programs have 90% of the processors (--nice)",
        "goes on: the processors are free again",
    ]
    assert len(busy) < 28 - 2 * Courtesy.LOOKS
