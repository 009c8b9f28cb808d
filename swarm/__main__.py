"""``python -m swarm``: the command ``swarm``, where no script of that name is on the PATH.

The command lives in ``peers``, which this package does not import; it is run as a program.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("peers.cli", run_name="__main__", alter_sys=True)
