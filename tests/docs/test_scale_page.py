"""docs/scale.md has the table of the cost model, and the examples for clusters are well formed."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from docs import scale as page

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def test_the_table_is_that_of_the_code():
    """`python -m docs.scale` writes it anew."""
    assert page.page() == page.PAGE.read_text()


def test_the_slurm_script_is_bash():
    done = subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("last", "code", "calls"),
    [
        ("Stopped at step 7 of 20; resume with: ...", 1, ["requeue 12"]),
        ("epoch   1  loss 1.0", 1, []),  # an error would come again
        ("Saved last.safetensors", 0, []),
    ],
)
def test_the_slurm_job_is_queued_again_only_if_it_was_stopped(tmp_path, last, code, calls):
    """With stand-ins for Slurm's commands and for torchrun, which writes a log and ends."""
    stand_ins = {
        "srun": 'shift; exec "$@"',
        "scontrol": f'[[ $1 == show ]] && echo first || echo "$@" >> {tmp_path}/calls',
        "torchrun": f'mkdir -p runs; echo "{last}" > runs/log.txt; echo "$@" > arguments; exit {code}',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "12"}
    done = subprocess.run(
        ["bash", CLUSTER / "slurm.sbatch", "photos", "runs"],
        cwd=tmp_path,
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (code, "")
    made = tmp_path / "calls"
    assert (made.read_text().splitlines() if made.exists() else []) == calls
    arguments = (tmp_path / "arguments").read_text()
    assert "--rdzv-endpoint first:29500 -m vitrail train photos --out runs --resume" in arguments


def test_the_kubernetes_file_starts_what_the_page_describes():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    assert f"--nnodes={job['spec']['completions']}" in arguments
    assert arguments[-1] == "--resume"
    assert pod["subdomain"] == service["metadata"]["name"]
    endpoint = next(one for one in arguments if one.startswith("--rdzv-endpoint="))
    assert endpoint.startswith(f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:")
