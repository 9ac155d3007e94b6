"""Whether another worker of torchrun's has ended, seen by one of them."""

import subprocess
import sys

WORKER = """
import sys
from moed.dist.torchrun_workers import a_worker_has_ended
for line in sys.stdin:
    print(a_worker_has_ended(int(line)), flush=True)
"""
# Starts as many workers as it is told, lets one of them look, ends another, lets it look again.
AGENT = """
import subprocess, sys
from subprocess import PIPE
code, num, is_reaped = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "reaped"
command = [sys.executable, "-c", code]
workers = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(num)]
something_else = subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE)
def look():
    workers[0].stdin.write(f"{num}\\n")
    workers[0].stdin.flush()
    return workers[0].stdout.readline().strip()
print(look())
workers[-1].stdin.close()
workers[-1].stdout.read()  # it has closed everything, and is a zombie soon
while not is_reaped and open(f"/proc/{workers[-1].pid}/stat").read().split()[2] != "Z":
    pass
if is_reaped:
    workers[-1].wait()
print(look())
something_else.communicate(b"\\n")
for worker in workers[:-1]:
    worker.communicate()
"""


def seen(num_workers: int, how: str) -> list[str]:
    command = [sys.executable, "-c", AGENT, WORKER, str(num_workers), how]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


def test_one_that_ended_is_missed() -> None:
    assert seen(3, "reaped") == ["False", "True"]


def test_one_that_torchrun_has_not_looked_after_yet_too() -> None:
    assert seen(2, "zombie") == ["False", "True"]
