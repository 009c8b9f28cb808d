"""Run swarms under random faults on virtual time, and say which seeds find something wrong.

python scripts/chaos.py --seeds 1000
python scripts/chaos.py --seed 123 --keep 0,4
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Become the harness: it belongs to the tests, and the order of sets must be the same."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    os.execv(sys.executable, [sys.executable, "-m", "tests.chaos.sweep", *sys.argv[1:]])


if __name__ == "__main__":
    main()
