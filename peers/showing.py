"""Where else a run is shown, beside the terminal of who leads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from peers.http import HttpAddress, bound, serve_app
from peers.starting import console
from peers.status import Monitor
from peers.writers import Guarded, TensorBoard, WeightsAndBiases
from swarm.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Shown:
    """What was asked for; empty: not there.

    ``http``, ``metrics``: addresses of the dashboard and of metrics for Prometheus.
    ``tensorboard``: a folder. ``wandb``: a project.
    """

    http: str = ""
    metrics: str = ""
    tensorboard: str = ""
    wandb: str = ""


NOWHERE = Shown()


class Showing:
    """Listens and writes from its making on; ``on`` shows a monitor there. A context manager.

    Raises:
        UserError: it cannot be: a port is taken, a library is missing.
    """

    def __init__(self, shown: Shown, manifest: Manifest | None) -> None:
        self._ways = [dashboard_at(shown.http), metrics_at(shown.metrics)]
        self._writers: list[Guarded] = []
        if shown.tensorboard:
            self._writers.append(Guarded("TensorBoard", TensorBoard(Path(shown.tensorboard))))
        if shown.wandb:
            config = {} if manifest is None else manifest.model_dump(mode="json")
            writer = WeightsAndBiases(shown.wandb, config)
            self._writers.append(Guarded("Weights & Biases", writer))

    def on(self, monitor: Monitor) -> None:
        for way in self._ways:
            way(monitor)
        monitor.listeners.extend(self._writers)

    def __enter__(self) -> Showing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for writer in self._writers:
            writer.close()


def metrics_at(text: str) -> Callable[[Monitor], None]:
    """Metrics for Prometheus, see ``Showing``."""
    if not text:
        return lambda monitor: None
    sock = HttpAddress.parse(text, "--metrics").bind("--metrics")

    def show(monitor: Monitor) -> None:
        from peers.metrics import RunMetrics, application

        monitor.servers.append(partial(serve_app, application(RunMetrics(monitor)), sock))
        console.print(f"metrics: http://{bound(sock)}/metrics", soft_wrap=True)

    return show


def dashboard_at(http: str) -> Callable[[Monitor], None]:
    """The dashboard, see ``Showing``."""
    if not http:
        return lambda monitor: None
    address = HttpAddress.parse(http, "--http")
    sock = address.bind("--http")

    def show(monitor: Monitor) -> None:
        from peers.dashboard import ANYBODY, LOOPBACK_NAMES, application  # a second of imports

        names = (*LOOPBACK_NAMES, address.host) if address.loopback else ANYBODY
        app = application(monitor.document, monitor.curve, names)
        monitor.servers.append(partial(serve_app, app, sock))
        at = HttpAddress(address.host, bound(sock).port)
        console.print(f"dashboard: http://{at}/", soft_wrap=True)
        if not address.loopback:
            console.print(
                "It has no password: whoever reaches that address sees the run, and can change "
                "nothing",
                style="yellow",
                soft_wrap=True,
            )

    return show
