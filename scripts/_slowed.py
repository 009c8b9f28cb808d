"""Runs ``swarm`` with stages that take their time: what they compute is mostly waited for.

    python _slowed.py SECONDS COMMAND...

A microbatch takes SECONDS in all stages together, forward and backward, and each stage its share
by cost. So many nodes share few cores, and none is slowed down by the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

FORWARD, BACKWARD = 1 / 3, 2 / 3


def slow_down(seconds: float) -> None:
    from peers.stage import StageOwner
    from swarm.model.needs import stage_needs

    takes_s: list[float] = []

    def look_up(owner: StageOwner) -> None:
        costs = [need.cost for need in stage_needs(owner._manifest, owner.spec)]
        takes_s.extend(seconds * cost / sum(costs) for cost in costs)

    def slowed(method: Callable[..., Any], share: float) -> Callable[..., Any]:
        @wraps(method)
        def late(self: StageOwner, *args: Any, **kwargs: Any) -> Any:
            if not takes_s:
                look_up(self)
            time.sleep(share * takes_s[self.stage])
            return method(self, *args, **kwargs)

        return late

    for name, share in (("forward", FORWARD), ("backward", BACKWARD), ("forward_backward", 1)):
        setattr(StageOwner, name, slowed(getattr(StageOwner, name), share))


def main() -> None:
    seconds, *words = sys.argv[1:]
    slow_down(float(seconds))
    from peers.cli import app

    app(words, prog_name="swarm")


if __name__ == "__main__":
    main()
