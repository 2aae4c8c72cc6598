"""`vitrail check`: the table, the exit codes, and misbehaving files."""

from pathlib import Path

import pytest

from tests.support.command import run_command
from tests.support.students import SOLUTION
from vitrail_course.exercises import NAMES, start_file


def check(*arguments, cwd, **environment):
    return run_command("check", *arguments, cwd=cwd, **environment)


def verdicts(text):
    """The verdict of each exercise in the table."""
    table = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name in NAMES:
            table[name] = rest.strip().split("  ")[0]
    return table


def one_line(text):
    """The text of the table on one line, without the columns."""
    return " ".join(text.split())


def test_start_writes_a_file_with_empty_functions(tmp_path):
    done = check("--start", "my.py", cwd=tmp_path)
    assert done.stdout.startswith("Saved my.py with 8 functions"), done.stderr
    assert "vitrail check my.py" in done.stdout
    assert done.returncode == 0
    written = (tmp_path / "my.py").read_text()
    again = check("--start", "my.py", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("vitrail: my.py already exists")
    assert (tmp_path / "my.py").read_text() == written
    done = check("my.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert verdicts(done.stdout) == dict.fromkeys(NAMES, "not yet")
    assert done.stdout.endswith("0 of 8 correct.\n")


def test_the_help_says_that_the_file_runs_with_your_rights(tmp_path):
    text = one_line(check("--help", cwd=tmp_path).stdout)
    assert "The file runs with your rights" in text
    assert "only files that you trust, or do it in a container" in text


NOISE = """
import sys
import torch
import neighbor
print("[red]NOISE"); print("NOISE", file=sys.stderr)
if __name__ == "__main__":
    raise RuntimeError
def vit(images, weights, config, correct=vit):
    print("NOISE")
    assert neighbor.x == 1
    return correct(images, weights, config)
"""


def test_a_correct_file_that_prints_and_imports(tmp_path):
    (tmp_path / "neighbor.py").write_text("x = 1")
    (tmp_path / "torch.py").write_text("raise RuntimeError('not the real one')")
    (tmp_path / "mein Übung.py").write_text(SOLUTION + NOISE)
    done = check("mein Übung.py", cwd=tmp_path, PYTHONDONTWRITEBYTECODE="")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert verdicts(done.stdout) == dict.fromkeys(NAMES, "correct")
    assert "NOISE" not in done.stdout
    assert done.stdout.endswith("8 of 8 correct.\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mein Übung.py", "neighbor.py", "torch.py"]


def test_all_verdicts_and_an_endless_loop(tmp_path):
    text = SOLUTION.replace(" / math.sqrt(d)", "")
    text = text.replace("    return table", "    return table + torch.ones(3, 5, 7)")
    text = text.replace("    hidden = F.gelu(hidden)", "    while True:\n        pass")
    (tmp_path / "my.py").write_text(text)
    line = text.splitlines().index("    while True:") + 1
    done = check("my.py", "--limit", "3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert verdicts(done.stdout) == dict(
        zip(
            NAMES,
            ["correct", "error", "correct", "wrong", "wrong", "error", "not yet", "not yet"],
            strict=True,
        )
    )
    text_shown = one_line(done.stdout)
    number = text.splitlines().index("    return table + torch.ones(3, 5, 7)") + 1
    assert f"Line {number}, in positions: RuntimeError: The size of tensor a" in text_shown
    assert "Likely mistake: The scale is missing. Divide the scores by sqrt(d)." in text_shown
    assert any(
        f"Line {at}: still running after 3 s, perhaps in an endless loop." in text_shown
        for at in (line, line + 1)
    )
    assert text_shown.count("Not checked, because mlp did not finish.") == 2
    assert text_shown.endswith("2 of 8 correct.")


def test_only_one_exercise(tmp_path):
    text = SOLUTION.replace("    hidden = F.gelu(hidden)", "    import os\n    os._exit(3)")
    (tmp_path / "my.py").write_text(text)
    done = check("my.py", "--only", "attention", cwd=tmp_path)
    assert done.returncode == 0
    assert verdicts(done.stdout) == {"attention": "correct"}
    assert done.stdout.endswith("1 of 1 correct.\n")
    done = check("my.py", "--only", "mlp", cwd=tmp_path)
    assert done.returncode == 1
    assert verdicts(done.stdout) == {"mlp": "error"}
    assert "Python exited with code 3" in one_line(done.stdout)
    done = check("my.py", "--only", "atention", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Unknown exercise 'atention'. Did you mean 'attention'?" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = 1\ndef f(:\n", "line 2: SyntaxError: invalid syntax."),
        (b"\nimport no_such_thing\n", "line 2: ModuleNotFoundError: No module named 'no_such_thing'."),
        (b"x = 1\nwhile True:\n    x += 1\n", "still running after 1 s"),
        (b"\x89PNG\r\n\x1a\n\0\0", "my.py"),
    ],
)
def test_a_file_that_cannot_be_imported_is_exit_code_2(tmp_path, content, message):
    (tmp_path / "my.py").write_bytes(content)
    done = check("my.py", "--limit", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vitrail: my.py cannot be imported: "), done.stderr
    assert message in done.stderr
    assert "Fix this first" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "my.py").read_bytes() == content


@pytest.mark.parametrize(("name", "what"), [("none.py", "does not exist"), ("folder", "is not a file")])
def test_not_a_file(tmp_path, name, what):
    (tmp_path / "folder").mkdir()
    done = check(name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"vitrail: {name} {what}")
    assert "vitrail check --start NEW.py" in done.stderr


def test_the_session_in_the_docs_is_current(tmp_path):
    """`vitrail check` on the functions of the page, added to the template, prints what the page shows."""
    page = (Path(__file__).parents[2] / "docs" / "exercises.md").read_text()
    functions = page.split("```python\n")[1].split("```")[0]
    shown = page.split("$ vitrail check my.py\n")[1].split("```")[0]
    start_file(tmp_path / "my.py")
    with open(tmp_path / "my.py", "a") as file:
        file.write(functions)
    done = check("my.py", cwd=tmp_path)
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()
