"""Read the images and parameters of a request, from a form, a body or the query string.

Forms are parsed in memory, with a limit on everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qsl

from vitrail.serve.messages import HTTPError, Request

FIELDS = ("top", "layer", "labels")  # fields besides "file"
_LISTED = f"{', '.join(FIELDS[:-1])} and {FIELDS[-1]}"
BOUNDARY = re.compile(r"""boundary=(?:"([\w'()+,./:=? -]{1,70})"|([\w'+./:?-]{1,70})(?:$|;|\s))""", re.ASCII)
NAME = re.compile(rb"""; *(name|filename)="((?:[^"\\\r\n]|\\.)*)\"""", re.IGNORECASE)
_MAX_PART_HEAD = 4096  # bytes of the header lines of a part
_MAX_FIELD = {"labels": 10_000}  # bytes of a field that is not a file; of others 100
_RAW_TYPES = ("", "application/octet-stream")  # these, and image/*, mean that the body is the image


@dataclass(frozen=True)
class Part:
    """An uploaded image, and its file name if there was one."""

    data: memoryview
    name: str | None = None


@dataclass(frozen=True)
class Form:
    """The files and the other fields of a request."""

    files: list[Part]
    fields: dict[str, str]

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """An integer parameter."""
        text = self.fields.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
            message = f"{name} must be an integer from {least} to {most}, such as {default}."
            raise HTTPError(400, f"bad_{name}", message)
        return int(text)


async def read_form(request: Request, files: int) -> Form:
    """The images of a request, at most `files`, and its parameters from the query and the form."""
    kind = request.headers.get("content-type", "")
    name = kind.partition(";")[0].strip().lower()
    parameters = _parse_query(request.query)
    if name not in (*_RAW_TYPES, "multipart/form-data") and not name.startswith("image/"):
        message = (
            "Content-Type must be multipart/form-data or image/*; for example, use curl -F file=@cat.jpg."
        )
        raise HTTPError(415, "wrong_content_type", message)
    body = await request.read()
    if name == "multipart/form-data":
        form = _parse_multipart(body, kind, files)
    else:
        form = Form([Part(memoryview(body))] if body else [], {})
    if not form.files:
        message = "The request contains no image; send one in the form field file, or as the body."
        raise HTTPError(400, "no_file", message)
    return Form(form.files, parameters | form.fields)


def _parse_query(text: str) -> dict[str, str]:
    """The parameters of a query string; unknown or repeated ones are errors."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=len(FIELDS))
    except ValueError:
        pairs = [("", "")]
    if len(dict(pairs)) < len(pairs) or not dict(pairs).keys() <= set(FIELDS):
        raise HTTPError(400, "bad_query", f"The query may contain {_LISTED}, each once; remove the rest.")
    return dict(pairs)


def _parse_multipart(body: bytes, content_type: str, files: int) -> Form:
    match = BOUNDARY.search(content_type)
    if match is None:
        raise _bad_form("the boundary is missing, or longer than 70 characters")
    form = Form([], {})
    for lines, data in _parts(body, (match[1] or match[2]).encode()):
        named = {word.lower(): value for word, value in NAME.findall(_disposition(lines))}
        name = named.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            if len(form.files) == files:
                message = f"A request may contain at most {files} images; send several requests."
                raise HTTPError(413, "too_many_files", message)
            form.files.append(Part(data, _file_name(named.get(b"filename"))))
        elif name in FIELDS and name not in form.fields and len(data) <= _MAX_FIELD.get(name, 100):
            form.fields[name] = bytes(data).decode("utf-8", "replace")
        else:
            raise _bad_form("a field is unknown, repeated or too long")
    return form


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the header lines and the data of each part; the data is a view, not a copy."""
    line = b"\r\n--" + boundary
    if not body.startswith(line[2:]):
        raise _bad_form("there is data before the first boundary")
    view, position = memoryview(body), len(line) - 2
    while body[position : position + 2] != b"--":
        begin = body.find(b"\r\n\r\n", position, position + _MAX_PART_HEAD)
        end = body.find(line, begin + 2) if begin >= 0 else -1
        if end < 0 or body[position : position + 2] != b"\r\n":
            raise _bad_form("a part has no header or no end")
        yield body[position:begin], view[begin + 4 : end]
        position = end + len(line)


def _disposition(lines: bytes) -> bytes:
    """The Content-Disposition line of a part. A part with a transfer encoding is refused."""
    heads = dict(line.lower().partition(b":")[::2] for line in lines.split(b"\r\n")[1:])
    if heads.get(b"content-transfer-encoding", b"binary").strip() not in (b"binary", b"8bit", b"7bit"):
        raise _bad_form("a part has a transfer encoding")
    return next((row for row in lines.split(b"\r\n") if row.lower().startswith(b"content-disposition:")), b"")


def _file_name(raw: bytes | None) -> str | None:
    return re.sub(r"\\(.)", r"\1", raw.decode("utf-8", "replace"))[:200] if raw else None


def _bad_form(reason: str) -> HTTPError:
    message = f"The form cannot be read: {reason}. Send the fields file, {_LISTED} only."
    return HTTPError(400, "bad_form", message)
