"""What commands do about memory."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from vitrail.cli.memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
def use():
    torch.empty(10_000_000).fill_(1)  # 40 MB
for _ in range(10):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)], stdout=subprocess.PIPE, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
def test_freed_memory_is_used_again_without_asking_the_system():
    assert faults(False) > 1_000  # otherwise there is nothing to gain, and the function can go
    assert faults(True) < 100
