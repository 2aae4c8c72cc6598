"""A form with files in it (multipart/form-data), whole in memory and bounded in every direction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vitrail.serve.messages import Refusal

FIELDS = ("top", "layer")  # besides "file"
BOUNDARY = re.compile(r"""boundary=(?:"([\w'()+,./:=? -]{1,70})"|([\w'+./:?-]{1,70})(?:$|;|\s))""", re.ASCII)
NAME = re.compile(rb"""; *(name|filename)="((?:[^"\\\r\n]|\\.)*)\"""", re.IGNORECASE)
HEAD = 4096  # bytes of the lines above a part
WORD = 100  # bytes of a field that is no file


@dataclass(frozen=True)
class Part:
    """A picture as it was sent, and what it was called; None where nobody said."""

    data: memoryview
    name: str | None = None


@dataclass(frozen=True)
class Form:
    files: list[Part]
    fields: dict[str, str]


def parse(body: bytes, kind: str, files: int) -> Form:
    """What a body holds, by its Content-Type. At most so many files."""
    found = BOUNDARY.search(kind)
    if found is None:
        raise broken("no boundary, or one longer than 70 letters")
    form = Form([], {})
    for lines, data in parts(body, (found[1] or found[2]).encode()):
        named = {word.lower(): value for word, value in NAME.findall(disposition(lines))}
        name = named.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            if len(form.files) == files:
                must = f"A request may have {files} pictures."
                raise Refusal(413, "too_many_files", must, "more", "Send several requests.")
            form.files.append(Part(data, file_name(named.get(b"filename"))))
        elif name in FIELDS and name not in form.fields and len(data) <= WORD:
            form.fields[name] = bytes(data).decode("utf-8", "replace")
        else:
            raise broken("a field of another name, a second of one name, or one too long")
    return form


def parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Each part: the lines above it, and itself, which stays where it is in the body."""
    line = b"\r\n--" + boundary
    if not body.startswith(line[2:]):
        raise broken("something before the first boundary")
    view, place = memoryview(body), len(line) - 2
    while body[place : place + 2] != b"--":
        begin = body.find(b"\r\n\r\n", place, place + HEAD)
        end = body.find(line, begin + 2) if begin >= 0 else -1
        if end < 0 or body[place : place + 2] != b"\r\n":
            raise broken("a part without its head or its end")
        yield body[place:begin], view[begin + 4 : end]
        place = end + len(line)


def disposition(lines: bytes) -> bytes:
    """The line that names a part. A part that is encoded once more would not be what it seems."""
    heads = dict(line.lower().partition(b":")[::2] for line in lines.split(b"\r\n")[1:])
    if heads.get(b"content-transfer-encoding", b"binary").strip() not in (b"binary", b"8bit", b"7bit"):
        raise broken("a part in another encoding")
    return next((row for row in lines.split(b"\r\n") if row.lower().startswith(b"content-disposition:")), b"")


def file_name(raw: bytes | None) -> str | None:
    return re.sub(r"\\(.)", r"\1", raw.decode("utf-8", "replace"))[:200] if raw else None


def broken(got: str) -> Refusal:
    must = f"A form must be multipart/form-data with the fields file, {', '.join(FIELDS)}."
    return Refusal(400, "bad_form", must, got, "Use an HTTP client, such as curl -F file=@cat.jpg.")
