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
NULL: Schema = {"type": "null"}
BYTES: Schema = {"type": "string", "format": "binary"}


def array_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def object_of(**properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


GUESS = object_of(label=TEXT, score=NUMBER)
REASON = object_of(reason=TEXT)
ARRAY = object_of(shape=array_of(INTEGER), dtype=TEXT, data={"type": "string", "contentEncoding": "base64"})
FIGURE: Schema = {"type": "object", "properties": {"model": TEXT}, "required": ["model"]}

SCHEMAS = {
    "Error": object_of(error=object_of(code=TEXT, message=TEXT)),
    "Prediction": object_of(
        name=any_of(TEXT, NULL),
        label=any_of(TEXT, NULL),
        score=any_of(NUMBER, NULL),
        unsure=BOOLEAN,
        ood=any_of(BOOLEAN, NULL),
        ood_score=any_of(NUMBER, NULL),
        labels=array_of(GUESS),
        top=array_of(GUESS),
        error=any_of(TEXT, NULL),
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
        parameters=any_of(INTEGER, NULL),
        preprocess=array_of(TEXT),
        card=object_of(license=TEXT, metrics={"type": "object", "additionalProperties": NUMBER}),
        limits=object_of(
            **dict.fromkeys(("bytes", "pixels", "side", "files", "queue", "batch", "decode_bytes"), INTEGER),
            **dict.fromkeys(("deadline", "decode_seconds"), NUMBER),
        ),
        explain=object_of(available=BOOLEAN, reason=any_of(TEXT, NULL)),
    ),
    "Examples": array_of(object_of(name=TEXT, url=TEXT)),
}
SECONDS = object_of(text=NUMBER, decode=NUMBER, model=NUMBER, total=NUMBER)
SCHEMAS["Embeddings"] = object_of(
    model=TEXT,
    embeddings=array_of(
        object_of(name=any_of(TEXT, NULL), embedding=any_of(array_of(NUMBER), NULL), error=any_of(TEXT, NULL))
    ),
    seconds=SECONDS,
)
SCHEMAS["Models"] = array_of(object_of(name=TEXT, url=TEXT, default=BOOLEAN))
PREDICTION = {"$ref": "#/components/schemas/Prediction"}
SCHEMAS["Predictions"] = object_of(model=TEXT, predictions=array_of(PREDICTION), seconds=SECONDS)
SCHEMAS["Explanation"] = {
    "type": "object",
    "properties": {
        "model": TEXT,
        "prediction": PREDICTION,
        "image": object_of(width=INTEGER, height=INTEGER, png=TEXT),
        "grid": array_of(INTEGER),
        "patch": array_of(INTEGER),
        "prefix": array_of(TEXT),
        "layers": INTEGER,
        "heads": INTEGER,
        "layer": INTEGER,
        "attention": {"type": "object"},
        "rollout": {"type": "object"},
        "lens": any_of(REASON, array_of(GUESS)),
    },
    "required": ["model", "prediction", "image", "grid", "layers", "heads", "layer", "attention", "lens"],
}

# Error responses of all routes, of guarded routes, and of routes that run the model.
ALWAYS = {
    **{
        400: "Malformed request",
        405: "Wrong method",
        408: "Timeout",
        431: "Headers too large",
        500: "Internal error",
    },
    **{501: "Unknown Transfer-Encoding", 503: "Too many connections: try again after Retry-After"},
}
GUARDED = {401: "Missing or wrong token", 403: "Host not accepted"}
MODEL = {503: "Busy: try again after Retry-After", 504: "Deadline exceeded"}
IMAGES = {
    403: "Host or Origin not accepted",
    413: "Too many bytes, pixels or images, or too much memory to decode",
    415: "Not an image",
    422: "Corrupt image, or too slow to decode",
}


def response(description: str, schema: Schema, kind: str = "application/json") -> Schema:
    return {"description": description, "content": {kind: {"schema": schema}}}


def operation(summary: str, success: Schema, *errors: dict[int, str], **more: Any) -> Schema:
    """The one method of a route, with its success and error responses."""
    error = {"$ref": "#/components/schemas/Error"}
    statuses = {status: text for group in (ALWAYS, *errors) for status, text in group.items()}
    rows = {str(status): response(text, error) for status, text in sorted(statuses.items())}
    return {"summary": summary, **more, "responses": {"200": success, **rows}}


def response_of(schema: str, description: str) -> Schema:
    return response(description, {"$ref": f"#/components/schemas/{schema}"})


def image_request(*names: str) -> dict[str, Any]:
    """A request with images, in a form (with parameters) or as the body."""
    digits = {"type": "string", "pattern": "^[0-9]{1,9}$"}
    parameters = {name: TEXT if name == "labels" else digits for name in names}
    form = {"type": "object", "properties": {"file": array_of(BYTES), **parameters}, "required": ["file"]}
    kinds = {"multipart/form-data": form, "application/octet-stream": BYTES, "image/*": BYTES}
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": TEXT if name == "labels" else INTEGER} for name in names
        ],
        "requestBody": {"required": True, "content": {kind: {"schema": one} for kind, one in kinds.items()}},
    }


def _of_a_model(methods: Schema) -> Schema:
    """The same operation for one of several models."""
    ((method, one),) = methods.items()
    missing = {"404": response("No such model", {"$ref": "#/components/schemas/Error"})}
    name = {"name": "model", "in": "path", "required": True, "schema": TEXT}
    parameters = [name, *one.get("parameters", [])]
    return {method: {**one, "parameters": parameters, "responses": missing | one["responses"]}}


def build_openapi(settings: ServeConfig, *, several: bool = False, mount: str = "") -> Schema:
    """The complete document.

    Args:
        several: whether the server has several models, each with routes of its own.
        mount: the path below which the app is mounted in another one.
    """
    number = {"name": "number", "in": "path", "required": True, "schema": INTEGER}
    readiness = object_of(ready=BOOLEAN)
    metrics = response("Metrics in the Prometheus text format", TEXT, "text/plain")
    example = {"description": "An image", "content": {"image/png": {}, "image/jpeg": {}}}
    page = response("The page", TEXT, "text/html")
    get: dict[str, Schema] = {
        "/v1/model": operation(
            "Model and limits", response_of("Model", "The model and the limits of the server"), GUARDED
        ),
        "/v1/filters": operation(
            "Principal components of the patch embedding", response("The figure", FIGURE), GUARDED, MODEL
        ),
        "/v1/positions": operation(
            "Similarity of position embeddings", response("The figure", FIGURE), GUARDED, MODEL
        ),
        "/v1/examples": operation("Example images", response_of("Examples", "Names and URLs"), GUARDED),
        "/v1/examples/{number}": operation(
            "One example image", example, GUARDED, {404: "No such image"}, parameters=[number]
        ),
        "/healthz": operation("Liveness", response("The server is alive", object_of(live=BOOLEAN))),
        "/readyz": operation("Readiness", response("The server is ready", readiness)),
        "/metrics": operation("Metrics", metrics, GUARDED),
        "/openapi.json": operation("This document", response("The OpenAPI document", {"type": "object"})),
        "/": operation("Interactive page", page),
    }
    get["/readyz"]["responses"]["503"] = response("Warming up or stopping", readiness)
    errors = (GUARDED, IMAGES, MODEL)
    post: dict[str, Schema] = {
        "/v1/predict": operation(
            "Predict labels; with labels=cat,dog, of these classes (a model with a text tower)",
            response_of("Predictions", "One prediction per image"),
            *errors,
            **image_request("top", "labels"),
        ),
        "/v1/embed": operation(
            "Embed images",
            response_of("Embeddings", "A vector of length 1 per image"),
            *errors,
            **image_request(),
        ),
        "/v1/explain": operation(
            "Explain one prediction",
            response_of("Explanation", "Prediction, attention, rollout and logit lens"),
            *errors,
            {404: "The model cannot be explained"},
            **image_request("layer", "top"),
        ),
    }
    paths = {path: {"get": one} for path, one in get.items()} | {
        path: {"post": one} for path, one in post.items()
    }
    if several:
        models = response_of("Models", "The models")
        paths["/v1/models"] = {"get": operation("The models by name", models, GUARDED)}
        paths |= {f"/v1/models/{{model}}/{name}": _of_a_model(paths[f"/v1/{name}"]) for name in MODEL_ROUTES}
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
