"""The wheel builds, installs and imports outside the repository."""

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import vitrail

ROOT = Path(__file__).parents[2]


def test_wheel(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, *build], check=True, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "vitrail/py.typed" in names
    assert not [name for name in names if not name.startswith("vitrail")]

    site = tmp_path / "site"
    subprocess.run(
        [*pip, "install", str(wheel), "--no-deps", "--target", str(site)], check=True, cwd=tmp_path
    )
    code = (
        "import vitrail as vt, torch; assert vt.__file__.startswith(r'%s'), vt.__file__;"
        "print(vt.__version__, tuple(vt.create('mu/4', classes=3)(torch.zeros(1, 3, 32, 32)).shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code % site],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{vitrail.__version__} (1, 3)\n", done.stderr
    assert (site / "bin" / "vitrail").exists()

    [metadata] = [name for name in names if name.endswith("METADATA")]
    needed = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata)).get_all("Requires-Dist")
    core = {line.split(">")[0] for line in needed if "extra" not in line}
    assert core == {"torch", "numpy", "pillow", "safetensors", "typer", "rich"}
