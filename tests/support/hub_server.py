"""A stand-in for the Hugging Face hub: a server in a thread, and Python processes that use it."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_ThisTokenIsNotForAnyonesEyes"
CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\nlicense: of the text, not of the model\n"

COMMAND = """
import sys
from vitrail.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub: lists the files of a model, and serves them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos = {}  # repository, revision, file
        self.closed, self.log, self.tokens, self.agents = {}, [], set(), set()
        self.cut = ""  # a file whose download is cut off
        self.in_xet = ""  # a file in the hub's other storage, whose client is not installed

    def add(self, repo, files, revision="main"):
        """Returns the commit."""
        self.repos.setdefault(repo, {})[revision] = files
        commit = hashlib.sha1(f"{repo} {revision} {sorted(files)}".encode()).hexdigest()
        self.repos[repo][commit] = files
        return commit

    def commit(self, repo, files):
        return next(name for name, one in self.repos[repo].items() if one is files and len(name) == 40)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def requested(self, method="GET"):
        """The requested files, without requests about the repository."""
        return [path.split("/", 5)[5] for verb, path in self.log if verb == method and "/resolve/" in path]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path))
        hub.tokens.add(token := self.headers.get("Authorization", ""))
        hub.agents.add(self.headers.get("User-Agent", ""))
        if path == "/xet":
            values = {"Cas-Url": hub.address, "Access-Token": "x", "Token-Expiration": 2**32}
            return self.give(b"", {f"X-Xet-{name}": value for name, value in values.items()})
        if not re.match(r"/api/models/|/[^/]+/[^/]+/resolve/", path):
            return self.refuse(404, "", token)
        parts = path.strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if listing else parts[:2])
        revision = (parts[5:] or ["main"])[0] if listing else parts[3]
        status, code = hub.closed.get(repo, (200, ""))
        if repo not in hub.repos:
            return self.refuse(404, "RepoNotFound", token)
        if revision not in hub.repos[repo]:
            return self.refuse(404, "RevisionNotFound", token)
        files = hub.repos[repo][revision]
        if listing:
            info = {
                "id": repo,
                "sha": hub.commit(repo, files),
                "siblings": [{"rfilename": name, "size": len(data)} for name, data in files.items()],
            }
            return self.give(json.dumps(info).encode(), {"Content-Type": "application/json"})
        if status != 200:
            return self.refuse(status, code, token)
        name = "/".join(parts[4:])
        if name not in files:
            return self.refuse(404, "EntryNotFound", token)
        tag = hashlib.sha1(files[name]).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": hub.commit(repo, files)}
        if name == hub.in_xet:
            headers |= {"X-Xet-Hash": "ab" * 32, "X-Xet-Refresh-Route": f"{hub.address}/xet"}
        self.give(files[name], headers, name)

    do_HEAD = do_POST = do_GET

    def give(self, content, headers, name=""):
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])  # where an interrupted download resumes
        self.send_response(206 if start else 200)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for key, value in {**headers, "Content-Length": len(content) - start}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            cut = name and name == self.server.cut
            self.wfile.write(content[start : len(content) // 2 if cut else None])

    def refuse(self, status, code, token):
        """Repeat the token in the message, as a careless server would."""
        self.send_response(status)
        for key, value in {
            "X-Error-Code": code,
            "X-Error-Message": f"No {token}",
            "Content-Length": 0,
        }.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def serve_hub():
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_against(hub, home, code, *arguments, fails=False, **more):
    """Run Python against the stand-in with this cache: its stdout and stderr, without the hub's own settings."""
    env = {
        name: value
        for name, value in os.environ.items()
        if "HF_" not in name and not name.lower().endswith(("_proxy", "s_offline"))
    }
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.address, **more}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == (2 if fails else 0), done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout, done.stderr
