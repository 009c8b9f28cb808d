"""Where a newcomer is needed."""

from __future__ import annotations

import random
from collections.abc import Sequence


def least_served(replicas: Sequence[int], rng: random.Random) -> int:
    """The stage with the fewest ``replicas`` (one number per stage); by lot among equals.

    Raises:
        ValueError: there are no stages.
    """
    fewest = min(replicas)
    return rng.choice([stage for stage, count in enumerate(replicas) if count == fewest])
