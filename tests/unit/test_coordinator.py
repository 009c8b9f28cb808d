"""What a coordinator does besides leading: it keeps a run directory, whatever the disk says."""

from __future__ import annotations

from pathlib import Path

from peers.coordinator import Coordinator, plan_run
from peers.status import Monitor
from swarm.manifest import default_manifest


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    monitor = Monitor()
    said: list[str] = []
    monitor.event = said.append  # type: ignore[method-assign]
    coordinator = Coordinator(
        plan_run(default_manifest()),
        out=tmp_path,
        monitor=monitor,
        on_open=lambda manifest, addresses: None,
    )

    def full() -> None:
        raise OSError(28, "No space left on device")

    coordinator._write(full)
    coordinator._write(full)
    assert len(said) == 1
    assert "No space left" in said[0]
    assert "the run goes on" in said[0]
