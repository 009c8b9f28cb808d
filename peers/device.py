"""``--device``: what a node computes on. Importing this takes no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.model.device import Device


def check_device(wish: str) -> None:
    """Raises ConfigError if ``wish`` is no word for a device, whatever there is here."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", wish, re.ASCII):
        raise ConfigError("--device", wish, "auto, cpu, cuda or cuda:N")


def choose_device(wish: str, *, reproducible: bool = False) -> Device:
    """The device for ``wish``: auto (a GPU if there is one), cpu, cuda (the first) or cuda:N.

    A reproducible run is the CPU's: on a GPU equal work does not always give equal bits.

    Raises:
        ConfigError: it is no such word, or there is no such device here.
    """
    check_device(wish)
    import torch

    from swarm.model.cuda import CudaCard
    from swarm.model.device import CPU
    from swarm.model.gpu import Gpu

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "auto":
        wish = "cuda" if count and not reproducible else "cpu"
    if wish == "cpu":
        return CPU
    if reproducible:
        raise ConfigError("--device", wish, "cpu or auto in a run with reproducible.enabled = true")
    if not count:
        why = "torch finds no GPU: it needs a build with CUDA, and the driver"
        raise ConfigError("--device", wish, f"cpu or auto here ({why})")
    index = int(wish.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError("--device", wish, f"cuda:0 to cuda:{count - 1} here")
    return Gpu(CudaCard(index))
