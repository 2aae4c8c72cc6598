"""Read the images and parameters of a request, from a form, a body or the query string."""

from __future__ import annotations

from urllib.parse import parse_qsl

from vitrail.serve.messages import HTTPError, Request
from vitrail.serve.multipart import FIELDS, Form, Part, parse_multipart

_RAW_TYPES = ("", "application/octet-stream")  # these, and image/*, mean that the body is the image


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
        form = parse_multipart(body, kind, files)
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
        message = (
            f"The query may contain {', '.join(FIELDS[:-1])} and {FIELDS[-1]}, each once; remove the rest."
        )
        raise HTTPError(400, "bad_query", message)
    return dict(pairs)


def integer_parameter(form: Form, name: str, default: int, least: int, most: int) -> int:
    """An integer parameter of a request."""
    text = form.fields.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        message = f"{name} must be an integer from {least} to {most}, such as {default}."
        raise HTTPError(400, f"bad_{name}", message)
    return int(text)
