"""The OpenAPI document of the routes. Tests validate every response against it."""

from __future__ import annotations

from typing import Any

from vitrail.base.version import __version__
from vitrail.serve.server_settings import ServeConfig

Schema = dict[str, Any]

MODEL_ROUTES = ("predict", "embed", "explain", "model", "filters", "positions")
"""What each of several models has under /v1/models/NAME/."""

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
BYTES: Schema = {"type": "string", "format": "binary"}
DIGITS: Schema = {"type": "string", "pattern": "^[0-9]{1,9}$"}


def array_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def object_of(**properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return OBJECT | {
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


GUESS = object_of(label=TEXT, score=NUMBER)
SECONDS = object_of(text=NUMBER, decode=NUMBER, model=NUMBER, total=NUMBER)
EMBEDDING = object_of(name=optional(TEXT), embedding=optional(array_of(NUMBER)), error=optional(TEXT))

SCHEMAS = {
    "Error": object_of(error=object_of(code=TEXT, message=TEXT)),
    "Prediction": object_of(
        name=optional(TEXT),
        label=optional(TEXT),
        score=optional(NUMBER),
        unsure=BOOLEAN,
        ood=optional(BOOLEAN),
        ood_score=optional(NUMBER),
        labels=array_of(GUESS),
        top=array_of(GUESS),
        error=optional(TEXT),
    ),
    "Predictions": object_of(model=TEXT, predictions=array_of(reference("Prediction")), seconds=SECONDS),
    "Embeddings": object_of(model=TEXT, embeddings=array_of(EMBEDDING), seconds=SECONDS),
    "Explanation": object_of(
        model=TEXT,
        prediction=reference("Prediction"),
        image=object_of(width=INTEGER, height=INTEGER, png=TEXT),
        grid=array_of(INTEGER),
        patch=array_of(INTEGER),
        prefix=array_of(TEXT),
        layers=INTEGER,
        heads=INTEGER,
        layer=INTEGER,
        attention=OBJECT,
        rollout=OBJECT,
        lens={"anyOf": [object_of(reason=TEXT), array_of(GUESS)]},
    ),
    "Model": object_of(
        name=TEXT,
        labels=object_of(count=INTEGER, first=array_of(TEXT)),
        words=BOOLEAN,
        scores=TEXT,
        multilabel=BOOLEAN,
        size=array_of(INTEGER),
        native=BOOLEAN,
        patch=array_of(INTEGER),
        grid=array_of(INTEGER),
        channels=INTEGER,
        depth=INTEGER,
        heads=INTEGER,
        width=INTEGER,
        parameters=optional(INTEGER),
        preprocess=array_of(TEXT),
        card=object_of(license=TEXT, metrics=OBJECT | {"additionalProperties": NUMBER}),
        limits=object_of(
            **dict.fromkeys(("bytes", "pixels", "side", "files", "queue", "batch", "decode_bytes"), INTEGER),
            **dict.fromkeys(("deadline", "decode_seconds"), NUMBER),
        ),
        explain=object_of(available=BOOLEAN, reason=optional(TEXT)),
    ),
    "Models": array_of(object_of(name=TEXT, url=TEXT, default=BOOLEAN)),
    "Figure": OBJECT | {"properties": {"model": TEXT}, "required": ["model"]},
    "Examples": array_of(object_of(name=TEXT, url=TEXT)),
    "Live": object_of(live=BOOLEAN),
    "Ready": object_of(ready=BOOLEAN),
}

# Error responses of all routes, of guarded routes, of routes that run the model, and of those with images.
ALWAYS = {
    400: "Malformed request",
    405: "Wrong method",
    408: "Timeout",
    431: "Headers too large",
    500: "Internal error",
    501: "Unknown Transfer-Encoding",
    503: "Busy or too many connections: try again after Retry-After",
}
GUARDED = {401: "Missing or wrong token", 403: "Host or Origin not accepted", 404: "Not there"}
MODEL = GUARDED | {504: "Deadline exceeded"}
IMAGES = MODEL | {
    413: "Too many bytes, pixels or images, or too much memory to decode",
    415: "Not an image",
    422: "Corrupt image, or too slow to decode",
}


def response(description: str, content: Schema | str) -> Schema:
    """A response: the name of a schema, or schemas by media type."""
    kinds = {"application/json": reference(content)} if isinstance(content, str) else content
    return {"description": description, "content": {kind: {"schema": one} for kind, one in kinds.items()}}


def get(summary: str, content: Schema | str, errors: dict[int, str] | None = None, **more: Any) -> Schema:
    return {"get": _operation(summary, content, errors or {}) | more}


def post(summary: str, schema: str, *names: str) -> Schema:
    """An operation on images, in a form (with parameters) or as the body."""
    fields = {name: TEXT if name == "labels" else DIGITS for name in names}
    form = OBJECT | {"properties": {"file": array_of(BYTES), **fields}, "required": ["file"]}
    kinds = {"multipart/form-data": form, "application/octet-stream": BYTES, "image/*": BYTES}
    body = {"required": True, "content": {kind: {"schema": one} for kind, one in kinds.items()}}
    parameters = [
        {"name": name, "in": "query", "schema": TEXT if name == "labels" else INTEGER} for name in names
    ]
    return {"post": _operation(summary, schema, IMAGES) | {"parameters": parameters, "requestBody": body}}


def _operation(summary: str, content: Schema | str, errors: dict[int, str]) -> Schema:
    """An operation with its success and error responses."""
    rows = {str(status): response(text, "Error") for status, text in sorted((ALWAYS | errors).items())}
    return {"summary": summary, "responses": {"200": response(summary, content), **rows}}


def _path_parameter(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def build_openapi(settings: ServeConfig, *, several: bool = False, mount: str = "") -> Schema:
    """The complete document.

    Args:
        several: whether the server has several models, each with routes of its own.
        mount: the path below which the app is mounted in another one.
    """
    example = {"image/png": BYTES, "image/jpeg": BYTES}
    number = [_path_parameter("number", INTEGER)]
    classes = "Predict labels; with labels=cat,dog, of these classes (a model with a text tower)"
    paths: dict[str, Schema] = {
        "/v1/predict": post(classes, "Predictions", "top", "labels"),
        "/v1/embed": post("Embed images: a vector of length 1 for each", "Embeddings"),
        "/v1/explain": post("Attention, rollout and logit lens of an image", "Explanation", "layer", "top"),
        "/v1/model": get("The model and the limits of the server", "Model", GUARDED),
        "/v1/filters": get("Principal components of the patch embedding", "Figure", MODEL),
        "/v1/positions": get("Similarity of position embeddings", "Figure", MODEL),
        "/v1/examples": get("Names and URLs of example images", "Examples", GUARDED),
        "/v1/examples/{number}": get("An example image", example, GUARDED, parameters=number),
        "/healthz": get("The server is alive", "Live"),
        "/readyz": get("The server is ready", "Ready"),
        "/metrics": get("Metrics in the Prometheus text format", {"text/plain": TEXT}, GUARDED),
        "/openapi.json": get("This document", {"application/json": OBJECT}),
        "/": get("Interactive page", {"text/html": TEXT}),
    }
    paths["/readyz"]["get"]["responses"]["503"] = response("Warming up or stopping", "Ready")
    if several:
        paths["/v1/models"] = get("The models by name", "Models", GUARDED)
        for name in MODEL_ROUTES:
            ((method, one),) = paths[f"/v1/{name}"].items()
            parameters = [_path_parameter("model", TEXT), *one.get("parameters", [])]
            paths[f"/v1/models/{{model}}/{name}"] = {method: one | {"parameters": parameters}}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "vitrail serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }
    if mount:
        document["servers"] = [{"url": mount}]
    if settings.token is not None:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in paths.items():
            if path.startswith("/v1/") or path == "/metrics":
                next(iter(methods.values()))["security"] = [{"token": []}]
    return document
