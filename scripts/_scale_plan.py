"""What a swarm of N peers would mean for directory, averaging and trainer, from measured sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

from dht.envelope import _open
from dht.hivemind_dht import MAX_SUBKEYS
from peers.averaging import PIECES_PER_MEMBER, SENDS_AT_ONCE
from peers.fields import MAX_MEMBERS
from peers.stage import PIECE
from scripts._paper_layers import LAYERS, MEGABIT, compute_s
from scripts._scale_sizes import Sizes, measure_sizes
from swarm.manifest_sections import Batch, Periods, Rebalancing

SWARMS = (1_000, 10_000, 100_000)
STAGES = 8
TFLOPS = 15.0
LINK = 200 * MEGABIT
LATENCY_S = 0.05
"""One way."""
LIFETIME_S = 6 * 3600.0
PARAMETERS = 12 * 4096**2
"""Of a stage: 16 blocks that share them."""
MESSAGES_PER_S = 1 / 0.00045
"""Of 1 KiB, one after the other, over p2pd's streams on one machine: 0.45 ms there and back."""

REMEMBERED = _open.cache_parameters()["maxsize"]
"""Envelopes whose signature is not checked again."""


def figures_of(peers: int, sizes: Sizes) -> dict[str, float]:
    """Of a swarm of ``peers``: bytes and messages per second, and the parts of a step, in s."""
    periods, looks = Periods(), Rebalancing()
    members = peers / STAGES
    found = peers * sizes.record * sizes.lookup_factor
    rate = members / compute_s(LAYERS[-1], TFLOPS) * 4 / 3  # three passes of work, not four
    # A microbatch: a launch, two receipts of each stage but the last, one of that.
    receipts = rate * (2 * STAGES - 1)
    sum_s = 2 * (members - 1) / members * 4 * PARAMETERS / LINK
    step_s = Batch.model_fields["microbatches"].metadata[1].le / rate
    pieces = max(PARAMETERS / PIECE, members * PIECES_PER_MEMBER)
    sends = 2 * pieces * (members - 1) / members
    return {
        "peers": peers,
        "records_per_key": members,
        "look_bytes_per_s": found / looks.period_s,
        "watch_bytes_per_s": found / periods.watch_s,
        "watch_cpu": _watch_cpu(peers, sizes, periods),
        "host_bytes_per_s": members * sizes.record * peers / looks.period_s,
        "microbatches_per_s": rate,
        "trainer_messages_per_s": receipts + rate + peers / periods.renew_s,
        "trainer_bytes_per_s": receipts * sizes.receipt
        + rate * sizes.forward
        + 2 * peers / periods.renew_s * sizes.renew,
        "asks_per_s": peers / LIFETIME_S * 2 * STAGES * 3,
        "prepare_bytes": members * members * sizes.prepare_per_member * STAGES,
        "decide_bytes": peers * peers * sizes.decide_per_peer,
        "sends_per_member": sends,
        "sum_s": sum_s,
        "sum_wait_s": sends / SENDS_AT_ONCE * 2 * LATENCY_S,
        "deaths_in_a_round": members * (sum_s + sends / SENDS_AT_ONCE * 2 * LATENCY_S) / LIFETIME_S,
        "deaths_unnoticed": peers * periods.silence_s / LIFETIME_S,
        "largest_step_s": step_s,
        "window": 2 * peers,
    }


def _watch_cpu(peers: int, sizes: Sizes, periods: Periods) -> float:
    """Of a core: what checking all records at each look takes.

    As long as all are remembered, each is checked when it has been announced anew; once there are
    more, each is checked in every answer of every look, and when it is decoded.
    """
    if peers <= REMEMBERED:
        anew_s = sizes.record_decode_s / periods.announce_s
        return peers * (anew_s + sizes.record_repeat_s / periods.watch_s)
    return peers * (sizes.lookup_factor + 1) * sizes.record_decode_s / periods.watch_s


BREAKS: tuple[tuple[str, str, Callable[[dict[str, float]], bool]], ...] = (
    (
        "a stage's key holds all its replicas",
        f"{MAX_SUBKEYS} records per key",
        lambda f: f["records_per_key"] <= MAX_SUBKEYS,
    ),
    (
        "those that keep a stage's records can send them to all who look",
        "200 Mb/s",
        lambda f: f["host_bytes_per_s"] <= LINK,
    ),
    ("a peer that looks", "a tenth of 200 Mb/s", lambda f: f["look_bytes_per_s"] <= LINK / 10),
    ("the trainer that watches", "200 Mb/s", lambda f: f["watch_bytes_per_s"] <= LINK),
    ("the trainer checks the records", "one core", lambda f: f["watch_cpu"] <= 1),
    (
        "the trainer's messages",
        "one core, 0.45 ms each",
        lambda f: f["trainer_messages_per_s"] <= MESSAGES_PER_S,
    ),
    (
        "decisions, sent in a tenth of a minute",
        "200 Mb/s",
        lambda f: f["decide_bytes"] <= 6 * LINK,
    ),
    (
        "prepares, sent in a tenth of a minute",
        "200 Mb/s",
        lambda f: f["prepare_bytes"] <= 6 * LINK,
    ),
    (
        "pieces of a sum wait for answers no longer than for the link",
        f"{SENDS_AT_ONCE} at once, 50 ms one way",
        lambda f: f["sum_wait_s"] <= f["sum_s"],
    ),
    (
        "a round ends before a member dies, as often as not",
        "lifetime 6 h",
        lambda f: f["deaths_in_a_round"] <= log(2),
    ),
    (
        "a moment without a death that is not noticed yet, as often as not",
        "lifetime 6 h, silence 5 s",
        lambda f: f["deaths_unnoticed"] <= log(2),
    ),
    ("members of a round", f"{MAX_MEMBERS}", lambda f: f["records_per_key"] <= MAX_MEMBERS),
    (
        "the window",
        f"{Batch.model_fields['microbatches'].metadata[1].le} microbatches in a step",
        lambda f: f["window"] <= Batch.model_fields["microbatches"].metadata[1].le,
    ),
)
"""What has to hold, what limits it, and whether it does."""


def breaks_at(holds: Callable[[dict[str, float]], bool], sizes: Sizes) -> int | None:
    """The number of peers from which on it does not hold; None: not below a hundred million."""
    low, high = 2 * STAGES, 10**8
    if holds(figures_of(high, sizes)):
        return None
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(figures_of(middle, sizes)) else (low, middle)
    return high


def plan() -> dict[str, Any]:
    sizes = measure_sizes(STAGES)
    return {
        "sizes": {name: getattr(sizes, name) for name in sizes.__slots__},
        "swarms": [figures_of(peers, sizes) for peers in SWARMS],
        "breaks": [
            {"what": what, "limit": limit, "peers": breaks_at(holds, sizes)}
            for what, limit, holds in BREAKS
        ],
    }


def show_plan(figures: dict[str, Any]) -> None:
    print("\nmeasured sizes (bytes) and times")
    for name, value in figures["sizes"].items():
        print(f"  {name:24}{value * 1e6:12,.0f} µs" if name.endswith("_s") else _line(name, value))
    print("\n" + f"{'of a swarm of':24}" + "".join(f"{f['peers']:>16,}" for f in figures["swarms"]))
    for name in list(figures["swarms"][0])[1:]:
        print(f"  {name:22}" + "".join(f"{_short(f[name]):>16}" for f in figures["swarms"]))
    print("\nwhat breaks, and from how many peers on")
    for line in sorted(figures["breaks"], key=lambda line: line["peers"] or 10**9):
        at = f"{line['peers']:,}" if line["peers"] else "never"
        print(f"  {at:>12}  {line['what']} ({line['limit']})")


def _line(name: str, value: float) -> str:
    return f"  {name:24}{value:12,.1f}"


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {letter}"
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
