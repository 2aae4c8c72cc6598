"""Run `vitrail` commands in processes of their own that need not load torch again.

A helper process, started once, has loaded torch and other libraries, and nothing of Vitrail. It forks for each
command, and the child becomes `python -m vitrail ARGUMENTS`: with its own folder, environment, output and exit
code, without the seconds that loading torch takes. What is judged by its start, its memory or its signals is tested
with `subprocess`.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LIBRARIES = (
    *("torch", "torch._dynamo", "numpy", "PIL.Image", "safetensors.torch"),
    *("rich.progress", "typer.rich_utils"),
)


def run_command(*arguments, cwd, columns=80, limits=None, **environment):
    """Run a command as a user would, without color; the result is that of `subprocess.run` with text output.

    Args:
        limits: what `resource.setrlimit` sets, such as {"RLIMIT_AS": 10**9}.
    """
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", **environment}
    return run_code(None, *arguments, cwd=cwd, environment=environment, limits=limits)


def run_code(code, *arguments, cwd, environment, limits=None, timeout=120):
    """Run Python code with these arguments and no environment variables but these."""
    words = [str(argument) for argument in arguments]
    request = {"code": code, "words": words, "cwd": str(cwd), "environment": environment, "limits": limits}
    request = json.dumps(request)
    with (
        open(os.devnull, "rb") as nothing,
        tempfile.TemporaryFile("w+b") as out,
        tempfile.TemporaryFile("w+b") as error,
    ):
        status = Launcher.get().run(request, [nothing, out, error], timeout)
        texts = []
        for stream in (out, error):
            stream.seek(0)
            texts.append(stream.read().decode().replace("\r\n", "\n"))
    return subprocess.CompletedProcess(words, status, *texts)


class Launcher:
    """The helper process, and the socket to it."""

    _running = None

    @classmethod
    def get(cls):
        if cls._running is None:
            cls._running = cls()
            atexit.register(cls._running.end)
        return cls._running

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.command", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.answers = self.socket.makefile("r")

    def end(self):
        self.answers.close()
        self.socket.close()  # which ends the process
        self.process.wait()

    def run(self, request, files, timeout):
        """The exit code of a command; negative if a signal ended it."""
        length = len(request.encode())
        socket.send_fds(self.socket, [length.to_bytes(8, "big")], [file.fileno() for file in files])
        self.socket.sendall(request.encode())
        process = int(self.answers.readline())
        self.socket.settimeout(timeout)
        try:
            return int(self.answers.readline())
        except TimeoutError:
            os.killpg(process, signal.SIGKILL)
            Launcher._running = None
            raise
        finally:
            self.socket.settimeout(None)


def _forget_helper():
    """In a child of a test: its commands and those of its parent would get each other's answers."""
    Launcher._running = None


os.register_at_fork(after_in_child=_forget_helper)


# ---- in the helper process ------------------------------------------------------------------


def serve(connection):
    for library in _LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # or collecting in a child would copy all of this
    while True:
        head, files, _, _ = socket.recv_fds(connection, 8, 3)
        if not head:
            return
        length, text = int.from_bytes(head, "big"), b""
        while len(text) < length:
            text += connection.recv(length - len(text))
        child = os.fork()
        if not child:
            connection.close()
            code = become_command(json.loads(text), files)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # without taking torch apart, which costs half a second
        for file in files:
            os.close(file)
        connection.sendall(f"{child}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(f"{code}\n".encode())


def become_command(request, files):
    """In the child: everything that `python -m vitrail` or `python -c` would find; the exit code."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    sys.path[:1] = [request["cwd"], *request["environment"].get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, limit in (request["limits"] or {}).items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    sys.argv = ["-c", *request["words"]]
    try:
        if request["code"] is None:
            runpy.run_module("vitrail", run_name="__main__", alter_sys=True)
        else:
            exec(request["code"], {"__name__": "__main__"})
    except SystemExit as stop:
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
