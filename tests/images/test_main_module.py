"""Worker processes are not told of the user's script, and the script's own process keeps its main module."""

import subprocess
import sys

import pytest

import vitrail as vt
from tests.support.tiny_runs import write_folder

# No `if __name__ == "__main__":` here, on purpose.
SCRIPT = """
import pickle, sys, threading
import vitrail as vt
from vitrail.images import workers

class Own:
    pass

print("the script runs", flush=True)
workers.MIN_IMAGES = 1  # processes for a few files
main, model, folder = sys.modules["__main__"], *sys.argv[1:]
answers, processes, losses, pickled = [], set(), 0, 0

class Watched(workers.WorkerProcess):
    def __init__(self, block):
        super().__init__(block)
        processes.add(self.process.pid)

workers.WorkerProcess = Watched

def predict():
    for _ in range(2):
        found = list(vt.Predictor(model, workers=1).stream([folder]))
        answers.append([one.logits.tolist() for one in found])

threads = [threading.Thread(target=predict) for _ in range(4)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    pickle.loads(pickle.dumps(Own()))
    losses += sys.modules["__main__"] is not main
    pickled += 1
assert sys.modules["__main__"] is main and not losses, losses
assert isinstance(pickle.loads(pickle.dumps(Own())), Own)
assert len(answers) == 8 and all(one == answers[0] for one in answers)
print(len(processes), "workers", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a window of its own for each process")
def test_threads_that_start_workers_leave_the_main_module_alone(tmp_path):
    folder = write_folder(tmp_path / "images", each=10)
    vt.Bundle(model=vt.create("mu/4@8", classes=2)).save(tmp_path / "model.safetensors")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "model.safetensors", folder]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script runs", "8 workers"], "workers ran the script again"
