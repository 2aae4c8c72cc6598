"""docs/scale.md has the table of the cost model, and the examples for clusters are well formed."""

import subprocess
from pathlib import Path

import pytest

from docs import scale as page

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def test_the_table_is_that_of_the_code():
    """`python -m docs.scale` writes it anew."""
    assert page.page() == page.PAGE.read_text()


def test_the_slurm_script_is_bash():
    done = subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kubernetes_file_starts_what_the_page_describes():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    assert f"--nnodes={job['spec']['completions']}" in arguments
    assert arguments[-1] == "--resume"
    assert pod["subdomain"] == service["metadata"]["name"]
    endpoint = next(one for one in arguments if one.startswith("--rdzv-endpoint="))
    assert endpoint.startswith(f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:")
