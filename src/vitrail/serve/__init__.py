"""A model as a small web service: one process, one event loop, one model thread, processes that decode.

from vitrail.serve import asgi

app = asgi("pets.safetensors")  # uvicorn main:app, or api.mount("/pets", app) in FastAPI
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.asgi_app import AsgiApp
    from vitrail.serve.server_settings import ServeConfig


def asgi(
    models: Predictor | str | Path | Mapping[str, Predictor | str | Path],
    settings: ServeConfig | None = None,
    **options: Any,
) -> AsgiApp:
    """The routes of `vitrail serve` as an ASGI application, with the same answers.

    Args:
        models: a model, or several by name; the first is that of /v1/predict, and each is below
            /v1/models/NAME/.
        settings: limits, and the token that clients must send. Without a token and without public=True,
            only requests with localhost or an IP address as their Host are answered.
        options: passed to `vitrail.Predictor`, such as device="cpu".
    """
    from vitrail.serve.asgi_app import build_asgi

    return build_asgi(models, settings, **options)
