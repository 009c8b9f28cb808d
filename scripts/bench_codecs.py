#!/usr/bin/env python3
"""How fast the codecs are on one core, beside a copy of the same memory and hivemind's 8 bits.

GB/s of float32, encoded and decoded as the swarm does it (into memory of the call's own), for
tensors of 64 KiB, 1 MiB and 16 MiB. All in turn in each round; medians over the rounds, and of
the ratio to the copy within each round. One thread; the seconds are of the wall clock, so run it on
a quiet machine. hivemind's blockwise codec needs bitsandbytes; without it that is said.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from scripts._bench import median, whole, write_json
from swarm.codecs import CODECS

Work = Callable[[], object]

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
AIM_GB_S = 1.2
MEMCPY = "memcpy"
BYTES_A_ROUND = 1 << 26
"""A round repeats each work until it has gone through so many bytes."""


def works(size: int) -> dict[str, Work]:
    """What is measured for tensors of ``size`` bytes, under "codec way"."""
    tensor = torch.randn(size // 4, generator=torch.Generator().manual_seed(1))
    shape = tuple(tensor.shape)
    found: dict[str, Work] = {MEMCPY: partial(torch.empty_like(tensor).copy_, tensor)}
    for name, codec in CODECS.items():
        # Received memory is writable and aligned, as wire.aligned_buffer makes it.
        data = memoryview(bytearray(codec.encode(tensor)))
        found[f"{name} encode"] = partial(codec.encode, tensor)
        found[f"{name} decode"] = partial(codec.decode, data, shape)
    return found | hivemind_works(tensor)


def hivemind_works(tensor: torch.Tensor) -> dict[str, Work]:
    """hivemind's blockwise codec, if it can run here."""
    if why_no_hivemind():
        return {}
    from hivemind.compression import BlockwiseQuantization, CompressionInfo

    codec, info = BlockwiseQuantization(), CompressionInfo.from_tensor(tensor)
    sent = codec.compress(tensor, info)
    return {
        "hivemind blockwise encode": partial(codec.compress, tensor, info),
        "hivemind blockwise decode": partial(codec.extract, sent),
    }


@cache
def why_no_hivemind() -> str:
    """Why hivemind's blockwise codec cannot run here; empty if it can."""
    try:
        from hivemind.compression import BlockwiseQuantization, CompressionInfo

        tensor, codec = torch.ones(4096), BlockwiseQuantization()
        codec.extract(codec.compress(tensor, CompressionInfo.from_tensor(tensor)))
    except (ImportError, TypeError) as error:  # TypeError: of its extract with numpy 2.4
        return str(error).split("\n")[0]
    return ""


def gb_s(work: Work, size: int, total: int) -> float:
    """Of ``size`` bytes each time: the median of as many times as make ``total`` bytes."""
    work()
    times = []
    for _ in range(max(3, total // size)):
        began = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - began)
    return size / median(times)


def measure(runs: int, total: int) -> dict[str, dict[str, Any]]:
    """By size and work: GB/s, and the multiple of a copy of the same size in the same round."""
    figures: dict[str, dict[str, Any]] = {}
    for label, size in SIZES.items():
        speeds: dict[str, list[float]] = {}
        todo = works(size)
        for _ in range(runs):
            for name, work in todo.items():
                speeds.setdefault(name, []).append(gb_s(work, size, total))
        figures[label] = {
            name: {
                "gb_s": median(found),
                "of_memcpy": median(
                    [one / copy for one, copy in zip(found, speeds[MEMCPY], strict=True)]
                ),
                "rounds": found,
            }
            for name, found in speeds.items()
        }
    return figures


def show(figures: dict[str, dict[str, Any]]) -> None:
    print(f"{'GB/s of fp32 (of a memcpy)':28}" + "".join(f"{label:>18}" for label in figures))
    for name in next(iter(figures.values())):
        row = [figures[label][name] for label in figures]
        cells = (f"{cell['gb_s']:9.2f} ({cell['of_memcpy']:6.1%})" for cell in row)
        print(f"{name:28}" + "".join(f"{cell:>18}" for cell in cells))
    print("fp32 copies nothing: its figure is the time of a call.")
    if reason := why_no_hivemind():
        print(f"hivemind's blockwise codec cannot run here: {reason}")
    slow = [
        f"{name} {label}"
        for label, row in figures.items()
        for name, cell in row.items()
        if name.split()[0] in CODECS and cell["gb_s"] < AIM_GB_S
    ]
    print(f"At least {AIM_GB_S} GB/s: " + ("all" if not slow else "not " + ", ".join(slow)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=whole, default=7, help="rounds; medians are over these")
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, total = (2, BYTES_A_ROUND // 8) if options.quick else (options.runs, BYTES_A_ROUND)
    figures = measure(runs, total)
    show(figures)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
