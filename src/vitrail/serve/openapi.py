"""GET /openapi.json: what the routes take and say. Tests hold every answer against it."""

from __future__ import annotations

from typing import Any

from vitrail import __version__
from vitrail.serve.settings import ServeConfig

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
YES_OR_NO: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
BYTES: Schema = {"type": "string", "format": "binary"}


def listing(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def thing(**properties: Schema) -> Schema:
    """An object with these properties: all of them, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


GUESS = thing(label=TEXT, score=NUMBER)
REASON = thing(reason=TEXT)
ARRAY = thing(shape=listing(WHOLE), dtype=TEXT, data={"type": "string", "contentEncoding": "base64"})
FIGURE: Schema = {"type": "object", "properties": {"model": TEXT}, "required": ["model"]}

SCHEMAS = {
    "Error": thing(error=thing(code=TEXT, message=TEXT)),
    "Prediction": thing(
        name=either(TEXT, NOTHING),
        label=either(TEXT, NOTHING),
        score=either(NUMBER, NOTHING),
        unsure=YES_OR_NO,
        top=listing(GUESS),
        error=either(TEXT, NOTHING),
    ),
    "Model": thing(
        name=TEXT,
        labels=thing(count=WHOLE, first=listing(TEXT)),
        size=listing(WHOLE),
        patch=listing(WHOLE),
        grid=listing(WHOLE),
        channels=WHOLE,
        depth=WHOLE,
        heads=WHOLE,
        width=WHOLE,
        parameters=either(WHOLE, NOTHING),
        preprocess=listing(TEXT),
        card=thing(licence=TEXT, metrics={"type": "object", "additionalProperties": NUMBER}),
        limits=thing(
            **dict.fromkeys(("bytes", "pixels", "side", "files", "queue", "batch", "decode_bytes"), WHOLE),
            **dict.fromkeys(("deadline", "decode_seconds"), NUMBER),
        ),
        explain=thing(there=YES_OR_NO, reason=either(TEXT, NOTHING)),
    ),
    "Examples": listing(thing(name=TEXT, url=TEXT)),
}
PREDICTION = {"$ref": "#/components/schemas/Prediction"}
SCHEMAS["Predictions"] = thing(
    model=TEXT, predictions=listing(PREDICTION), seconds=thing(decode=NUMBER, model=NUMBER, total=NUMBER)
)
SCHEMAS["Explanation"] = {
    "type": "object",
    "properties": {
        "model": TEXT,
        "prediction": PREDICTION,
        "picture": thing(width=WHOLE, height=WHOLE, png=TEXT),
        "grid": listing(WHOLE),
        "patch": listing(WHOLE),
        "prefix": listing(TEXT),
        "layers": WHOLE,
        "heads": WHOLE,
        "layer": WHOLE,
        "attention": {"type": "object"},
        "rollout": {"type": "object"},
        "lens": either(REASON, listing(GUESS)),
    },
    "required": ["model", "prediction", "picture", "grid", "layers", "heads", "layer", "attention", "lens"],
}

# What any request may meet, what a guarded route may, and what work may.
ALWAYS = {
    **{400: "Malformed", 405: "Another method", 408: "Too slow", 431: "Too long a head", 500: "A bug"},
    **{501: "An unknown Transfer-Encoding", 503: "Too many clients: come again after Retry-After"},
}
GUARDED = {401: "No token, or another", 403: "Asked by a name that is not this server's"}
WORKING = {503: "Busy: come again after Retry-After", 504: "Not answered in time"}
PICTURES = {
    403: "From a page of another server, or by a name that is not this one's",
    413: "Too many bytes, pixels or images, or too much memory to decode",
    415: "Not a picture",
    422: "A broken image, or one that is too slow to decode",
}


def answer(words: str, schema: Schema, kind: str = "application/json") -> Schema:
    return {"description": words, "content": {kind: {"schema": schema}}}


def operation(summary: str, good: Schema, *troubles: dict[int, str], **more: Any) -> Schema:
    """A route's one method: its good answer, and every way in which it may end otherwise."""
    wrong = {"$ref": "#/components/schemas/Error"}
    meets = {status: words for some in (ALWAYS, *troubles) for status, words in some.items()}
    rows = {str(status): answer(words, wrong) for status, words in sorted(meets.items())}
    return {"summary": summary, **more, "responses": {"200": good, **rows}}


def named(schema: str, words: str) -> Schema:
    return answer(words, {"$ref": f"#/components/schemas/{schema}"})


def asking(*names: str) -> dict[str, Any]:
    """How pictures are sent: in a form, where the words may be too, or as the body."""
    words = {name: {"type": "string", "pattern": "^[0-9]{1,9}$"} for name in names}
    form = {"type": "object", "properties": {"file": listing(BYTES), **words}, "required": ["file"]}
    kinds = {"multipart/form-data": form, "application/octet-stream": BYTES, "image/*": BYTES}
    return {
        "parameters": [{"name": name, "in": "query", "schema": WHOLE} for name in names],
        "requestBody": {"required": True, "content": {kind: {"schema": one} for kind, one in kinds.items()}},
    }


def describe(settings: ServeConfig) -> Schema:
    """The whole document."""
    number = {"name": "number", "in": "path", "required": True, "schema": WHOLE}
    told = thing(ready=YES_OR_NO)
    plain = answer("Numbers for Prometheus", TEXT, "text/plain")
    example = {"description": "A picture", "content": {"image/png": {}, "image/jpeg": {}}}
    page = answer("The page", TEXT, "text/html")
    get: dict[str, Schema] = {
        "/v1/model": operation("What is served", named("Model", "The model and the limits"), GUARDED),
        "/v1/filters": operation("What the patch embedding looks for", answer("", FIGURE), GUARDED, WORKING),
        "/v1/positions": operation("How alike positions are", answer("", FIGURE), GUARDED, WORKING),
        "/v1/examples": operation("Pictures to begin with", named("Examples", "Their addresses"), GUARDED),
        "/v1/examples/{number}": operation(
            "One of them", example, GUARDED, {404: "No such picture"}, parameters=[number]
        ),
        "/healthz": operation("Whether the server lives", answer("It does", thing(live=YES_OR_NO))),
        "/readyz": operation("Whether requests are welcome", answer("They are", told)),
        "/metrics": operation("What was counted", plain, GUARDED),
        "/openapi.json": operation("This document", answer("It", {"type": "object"})),
        "/": operation("A page to look inside the model", page),
    }
    get["/readyz"]["responses"]["503"] = answer("They are not: warming up, or stopping", told)
    told_all = (GUARDED, PICTURES, WORKING)
    post: dict[str, Schema] = {
        "/v1/predict": operation(
            "Labels for pictures", named("Predictions", "One for each"), *told_all, **asking("top")
        ),
        "/v1/explain": operation(
            "One picture, and what the model does with it",
            named("Explanation", "What was seen on the way"),
            *told_all,
            {404: "A model that cannot be looked into"},
            **asking("layer", "top"),
        ),
    }
    paths = {path: {"get": one} for path, one in get.items()} | {
        path: {"post": one} for path, one in post.items()
    }
    found: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "vitrail serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }
    if settings.token is not None:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in paths.items():
            if path.startswith("/v1/") or path == "/metrics":
                next(iter(methods.values()))["security"] = [{"token": []}]
    return found
