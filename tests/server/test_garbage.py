"""What is there stays, and what is made later is still freed."""

import subprocess
import sys

PROGRAM = """
import gc
from moed.server.garbage import THRESHOLDS, look_seldom

class Cycle:
    num_alive = 0
    def __init__(self):
        self.own = self
        Cycle.num_alive += 1
    def __del__(self):
        Cycle.num_alive -= 1

kept = Cycle()
look_seldom()
assert gc.get_freeze_count() > 1000 and gc.isenabled()
most = 0
for _ in range(100_000):
    Cycle()
    most = max(most, Cycle.num_alive)
assert 1 < most <= 2 * THRESHOLDS[0], most
assert kept.own is kept
"""


def test_garbage_in_cycles_is_bounded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
