"""``--nice``: computing at the lowest priority, and not at all while others want the machine."""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio
import psutil

from swarm.core.caps import Courtesy

LOOK_S = 2.0
LEAST_PRIORITY = 19


class Others:
    """What part of the processors others have had since the last look."""

    def __init__(self) -> None:
        self._at, self._own = self._now(), self._own_s()

    def look(self) -> float:
        """0 to 1."""
        (wall, idle), own = self._now(), self._own_s()
        (wall_before, idle_before), own_before = self._at, self._own
        self._at, self._own = (wall, idle), own
        passed = wall - wall_before
        if passed <= 0:
            return 0.0
        busy = passed - (idle - idle_before) - max(0.0, own - own_before)
        return min(1.0, max(0.0, busy / passed))

    def _now(self) -> tuple[float, float]:
        """Seconds of all processors together, and of these idle."""
        times = psutil.cpu_times()
        return sum(times), times.idle + getattr(times, "iowait", 0.0)

    def _own_s(self) -> float:
        """Of this process and of those that it has started."""
        me = psutil.Process()
        total = 0.0
        for process in (me, *me.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total


async def be_nice(pause: Callable[[bool], None], say: Callable[[str], None]) -> None:
    """For ever. ``pause`` is called when it begins (True) and when it ends."""
    os.nice(LEAST_PRIORITY)
    others, courtesy = Others(), Courtesy()
    while True:
        await anyio.sleep(LOOK_S)
        found = others.look()
        if courtesy.look(found):
            pause(courtesy.paused)
            if courtesy.paused:
                say(f"pauses: other programs have {found:.0%} of the processors (--nice)")
            else:
                say("goes on: the processors are free again")
