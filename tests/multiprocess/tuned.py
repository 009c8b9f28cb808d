"""Runs ``swarm`` with streams that are closed after one second without use, not sixty.

    python tuned.py COMMAND...

Whoever counts descriptors need not wait for those of a peer that has gone.
"""

from __future__ import annotations

import sys
from functools import partial

IDLE_S = 1.0


def main() -> None:
    from peers import p2pd

    p2pd.Tuning = partial(p2pd.Tuning, idle_s=IDLE_S)  # type: ignore[assignment, misc]
    from peers.cli import app

    app(sys.argv[1:], prog_name="swarm")


if __name__ == "__main__":
    main()
