"""`vitrail check`: the table, the exit codes, and files that do not behave."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.exercises import NAMES, start_file

SOLUTION = (Path(__file__).parents[1] / "exercises" / "solution.py").read_text()


def check(*arguments, cwd, **environment):
    """Run the command as a user would, in a terminal 80 columns wide without colour."""
    return subprocess.run(
        [sys.executable, "-m", "vitrail", "check", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def verdicts(text):
    """Exercise to verdict, as the table has them."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name in NAMES:
            found[name] = rest.strip().split("  ")[0]
    return found


def said(text):
    """The table's words on one line, without the columns."""
    return " ".join(text.split())


def test_start_and_what_is_not_yet_there(tmp_path):
    done = check("--start", "my.py", cwd=tmp_path)
    assert done.stdout == "my.py is there: 8 functions to write. Then: vitrail check my.py\n", done.stderr
    assert done.returncode == 0
    written = (tmp_path / "my.py").read_text()
    again = check("--start", "my.py", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == (
        "vitrail: --start must name a new file: nothing of yours is overwritten. "
        "Got my.py, which is there already. Name another file.\n"
    )
    assert (tmp_path / "my.py").read_text() == written
    done = check("my.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert verdicts(done.stdout) == dict.fromkeys(NAMES, "not yet")
    assert done.stdout.endswith("0 of 8 right.\n")


NOISE = """
import sys
import torch
import neighbour
print("[red]NOISE"); print("NOISE", file=sys.stderr)
if __name__ == "__main__":
    raise RuntimeError
def vit(images, weights, config, right=vit):
    print("NOISE")
    assert neighbour.x == 1
    return right(images, weights, config)
"""


def test_a_right_file_that_prints_and_imports(tmp_path):
    (tmp_path / "neighbour.py").write_text("x = 1")
    (tmp_path / "torch.py").write_text("raise RuntimeError('not the real one')")
    (tmp_path / "mein Übung.py").write_text(SOLUTION + NOISE)
    done = check("mein Übung.py", cwd=tmp_path, PYTHONDONTWRITEBYTECODE="")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert verdicts(done.stdout) == dict.fromkeys(NAMES, "right")
    assert "NOISE" not in done.stdout
    assert done.stdout.endswith("8 of 8 right.\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mein Übung.py", "neighbour.py", "torch.py"]


def test_wrong_error_not_yet_and_an_endless_loop(tmp_path):
    text = SOLUTION.replace(" / math.sqrt(d)", "")
    text = text.replace("    return table", "    return table + torch.ones(3, 5, 7)")
    text = text.replace("    hidden = F.gelu(hidden)", "    while True:\n        pass")
    (tmp_path / "my.py").write_text(text)
    line = text.splitlines().index("    while True:") + 1
    done = check("my.py", "--limit", "3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert verdicts(done.stdout) == dict(
        zip(NAMES, ["right", "error", "right", "wrong", "wrong", "error", "not yet", "not yet"], strict=True)
    )
    words = said(done.stdout)
    number = text.splitlines().index("    return table + torch.ones(3, 5, 7)") + 1
    assert f"Line {number}, in positions: RuntimeError: The size of tensor a" in words
    assert "Likely: The scale is missing. Divide the scores by sqrt(d)." in words
    assert any(
        f"Line {at}: still running after 3 s, in an endless loop perhaps." in words for at in (line, line + 1)
    )
    assert words.count("Not marked: mlp did not end.") == 2
    assert words.endswith("2 of 8 right.")


def test_only_one(tmp_path):
    text = SOLUTION.replace("    hidden = F.gelu(hidden)", "    import os\n    os._exit(3)")
    (tmp_path / "my.py").write_text(text)
    done = check("my.py", "--only", "attention", cwd=tmp_path)
    assert done.returncode == 0
    assert verdicts(done.stdout) == {"attention": "right"}
    assert done.stdout.endswith("1 of 1 right.\n")
    done = check("my.py", "--only", "mlp", cwd=tmp_path)
    assert done.returncode == 1
    assert verdicts(done.stdout) == {"mlp": "error"}
    assert "Python itself ended with the code 3: by os._exit" in said(done.stdout)
    done = check("my.py", "--only", "atention", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--only takes the name of an exercise. Got 'atention'. Did you mean 'attention'?" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = 1\ndef f(:\n", "my.py, line 2: SyntaxError: invalid syntax."),
        (b"\nimport no_such_thing\n", "my.py, line 2: ModuleNotFoundError: No module named 'no_such_thing'."),
        (b"x = 1\nwhile True:\n    x += 1\n", "still running after 1 s, in an endless loop perhaps."),
        (b"\x89PNG\r\n\x1a\n\0\0", "my.py, "),
    ],
)
def test_what_cannot_be_imported_is_code_2_and_one_line(tmp_path, content, message):
    (tmp_path / "my.py").write_bytes(content)
    done = check("my.py", "--limit", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "vitrail: A file of exercises must be Python that can be imported. Got my.py, "
    ), done.stderr
    assert message in done.stderr
    assert done.stderr.endswith(" Repair this first; then its functions can be marked.\n")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "my.py").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "what"), [("none.py", "which is not there"), ("folder", "which is no file")]
)
def test_what_is_no_file(tmp_path, name, what):
    (tmp_path / "folder").mkdir()
    done = check(name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"vitrail: check takes a Python file with your functions. Got {name}, {what}. "
        "vitrail check --start NEW.py writes one to fill in.\n"
    )


def test_the_session_in_the_docs_is_real(tmp_path):
    """`vitrail check` on the page's functions, behind those of the template, says what the page says."""
    page = (Path(__file__).parents[2] / "docs" / "exercises.md").read_text()
    functions = page.split("```python\n")[1].split("```")[0]
    shown = page.split("$ vitrail check my.py\n")[1].split("```")[0]
    start_file(tmp_path / "my.py")
    with open(tmp_path / "my.py", "a") as file:
        file.write(functions)
    done = check("my.py", cwd=tmp_path)
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()
