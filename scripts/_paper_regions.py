"""Peers in ten regions of the world, and how they come and go: the setting of the wiring table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import asin, cos, radians, sin, sqrt

from scripts._paper_layers import MEGABIT
from swarm.sim.world import Latency, Machine
from swarm.types import PeerId

REGIONS: dict[str, tuple[float, float]] = {
    "Virginia": (38.9, -77.5),
    "Oregon": (45.6, -121.2),
    "Iowa": (41.3, -95.9),
    "Sao Paulo": (-23.5, -46.6),
    "Ireland": (53.3, -6.3),
    "Frankfurt": (50.1, 8.7),
    "Mumbai": (19.1, 72.9),
    "Singapore": (1.35, 103.8),
    "Tokyo": (35.7, 139.7),
    "Sydney": (-33.9, 151.2),
}
"""Latitude and longitude, degrees."""

EARTH_KM = 6371.0
FIBRE_KM_PER_S = 200_000.0
"""Light in glass."""
DETOUR = 1.5
"""Cables do not follow great circles."""
LAST_MILE_S = 0.005

TFLOPS = (8.0, 32.0)
RATES = (50 * MEGABIT, 500 * MEGABIT)


@dataclass(frozen=True, slots=True)
class Churn:
    """In each ``period_s`` a ``share`` of the peers dies, each replaced at once by another."""

    share: float
    period_s: float


def one_way_s(a: str, b: str) -> float:
    """Seconds from one region to another, by the length of a cable between them."""
    return LAST_MILE_S + DETOUR * _great_circle_km(REGIONS[a], REGIONS[b]) / FIBRE_KM_PER_S


def latencies() -> Latency:
    names = list(REGIONS)
    between = {(a, b): one_way_s(a, b) for i, a in enumerate(names) for b in names[i:]}
    return Latency(default_s=LAST_MILE_S, between=between)


def _great_circle_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    (lat_a, lon_a), (lat_b, lon_b) = (tuple(map(radians, point)) for point in (a, b))
    half = sin((lat_b - lat_a) / 2) ** 2
    half += cos(lat_a) * cos(lat_b) * sin((lon_b - lon_a) / 2) ** 2
    return 2 * EARTH_KM * asin(sqrt(half))


def peers(count: int, stages: int, rng: random.Random) -> list[Machine]:
    """``count`` peers, dealt out to regions and stages in turn, of unequal speed and link.

    Speeds are spread evenly on a logarithmic scale, links likewise.
    """
    regions = list(REGIONS)
    rng.shuffle(regions)
    return [
        _machine(f"peer-{n:03d}", regions[n % len(regions)], n % stages, rng) for n in range(count)
    ]


def _machine(name: str, region: str, stage: int, rng: random.Random) -> Machine:
    rate = _log_uniform(*RATES, rng)
    return Machine(
        peer=name,
        tflops=_log_uniform(*TFLOPS, rng),
        up_bytes_per_s=rate,
        down_bytes_per_s=rate,
        region=region,
        stage=stage,
    )


def _log_uniform(low: float, high: float, rng: random.Random) -> float:
    return float(low * (high / low) ** rng.random())


def with_churn(
    first: Sequence[Machine], churn: Churn, duration_s: float, rng: random.Random
) -> list[Machine]:
    """``first``, of whom some die as by SIGKILL, and those that come in their place.

    Who comes serves the stage of who has died, from some other region, and has a speed of its own;
    ``place_of`` tells whose place it took. The last peer of a stage is spared, and so is who came
    in the same period.
    """
    alive = list(first)
    gone: list[Machine] = []
    periods = int(duration_s // churn.period_s) if churn.share else 0
    for period in range(periods):
        # The share is met on average: what is left of a whole peer decides by lot.
        deaths = int(churn.share * len(alive) + rng.random())
        for victim in rng.sample(alive, deaths):
            if sum(p.stage == victim.stage for p in alive) < 2:
                continue
            at = (period + rng.random()) * churn.period_s
            name = f"{place_of(victim.peer)}.{len(gone)}"
            newcomer = _machine(name, rng.choice(list(REGIONS)), victim.stage or 0, rng)
            alive.remove(victim)
            gone.append(replace(victim, leaves_s=at))
            alive.append(replace(newcomer, arrives_s=at))
    return sorted([*alive, *gone], key=lambda p: (p.arrives_s, p.peer))


def place_of(peer: PeerId) -> PeerId:
    """The first peer of the run that had this one's place."""
    return peer.partition(".")[0]


def present(machines: Sequence[Machine], at_s: float) -> list[Machine]:
    return [p for p in machines if p.arrives_s <= at_s < p.leaves_s]
