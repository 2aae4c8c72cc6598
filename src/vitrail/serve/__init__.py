"""A model as a small web service: one process, one event loop, one model thread, processes that decode.

from vitrail.serve import asgi

app = asgi("pets.safetensors")  # uvicorn main:app, or api.mount("/pets", app) in FastAPI
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.app import App
    from vitrail.serve.server_settings import ServeConfig


def asgi(
    models: Predictor | str | Path | Mapping[str, Predictor | str | Path],
    settings: ServeConfig | None = None,
    **options: Any,
) -> App:
    """The ASGI application that `vitrail serve` runs.

    Args:
        models: a model, or several by name; the first is that of /v1/predict, and each is below
            /v1/models/NAME/.
        settings: limits, and the token that clients must send. Without a token and without public=True,
            only requests with localhost or an IP address as their Host are answered.
        options: passed to `vitrail.Predictor`, such as device="cpu".
    """
    from vitrail.predict import Predictor
    from vitrail.serve.app import App
    from vitrail.serve.server_settings import ServeConfig

    named = models if isinstance(models, Mapping) else {"": models}
    predictors = {
        name: model if isinstance(model, Predictor) else Predictor(model, **options)
        for name, model in named.items()
    }
    if "" in predictors:
        predictor = predictors.pop("")
        given = models if isinstance(models, (str, Path)) else ""
        predictors = {predictor.card.name or Path(given).stem or "model": predictor}
    return App(predictors, settings or ServeConfig(), log=lambda line: print(line, file=sys.stderr))
