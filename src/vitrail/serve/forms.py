"""What a client sends along: pictures, and the few words that go with them."""

from __future__ import annotations

from urllib.parse import parse_qsl

from vitrail.serve.messages import Refusal, Request
from vitrail.serve.multipart import FIELDS, Form, Part, parse

PLAIN = ("", "application/octet-stream")  # or image/...: the body is the picture, whatever the kind says


async def read_form(request: Request, files: int) -> Form:
    """The pictures of a request, at most so many, and its words from the address and the form."""
    kind = request.headers.get("content-type", "")
    name = kind.partition(";")[0].strip().lower()
    words = query(request.query)
    if name not in (*PLAIN, "multipart/form-data") and not name.startswith("image/"):
        must = "A request must be a form (multipart/form-data) or the picture itself (image/...)."
        raise Refusal(415, "wrong_kind", must, "another Content-Type", "Such as curl -F file=@cat.jpg.")
    body = await request.read()
    plain = Form([Part(memoryview(body))] if body else [], {})
    form = parse(body, kind, files) if name == "multipart/form-data" else plain
    if not form.files:
        do = "Send one in the field file, or as the body."
        raise Refusal(400, "no_file", "There must be a picture.", "none", do)
    return Form(form.files, words | form.fields)


def query(text: str) -> dict[str, str]:
    """The words after the question mark; only those that mean something."""
    try:
        found = parse_qsl(text, keep_blank_values=True, max_num_fields=len(FIELDS))
    except ValueError:
        found = [("", "")]
    if len(dict(found)) < len(found) or not dict(found).keys() <= set(FIELDS):
        must = f"An address may end with {' and '.join(f'{name}=' for name in FIELDS)}."
        raise Refusal(400, "bad_query", must, "something else", "Leave it out.")
    return dict(found)


def wanted(form: Form, name: str, default: int, least: int, most: int) -> int:
    """A number among the words of a form."""
    text = form.fields.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        must = f"{name} must be a number from {least} to {most}."
        raise Refusal(400, f"bad_{name}", must, "something else", f"Such as {name}={default}.")
    return int(text)
