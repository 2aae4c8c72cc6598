"""`vitrail serve`: an HTTP server for predictions, with a web page."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from vitrail.base.errors import FileError, InputError, printable, require_extra
from vitrail.base.safe_files import read_limited
from vitrail.cli.options import NATIVE, ModelOptions, SpeedOptions

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.server_settings import ServeConfig

_TOKEN = "VITRAIL_TOKEN"
_MAX_TOKEN = 4096  # bytes of its file
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,40})=(.+)")


def serve(
    models: list[str] = Argument(
        ...,
        metavar="MODEL...",
        help="A weight file, a model folder, hf:owner/name, or an .onnx file; or several as NAME=MODEL.",
    ),
    host: str = Option("127.0.0.1", help="The address to listen on; 0.0.0.0 for all interfaces."),
    port: int = Option(8000, min=0, max=65535, help="The port to listen on; 0 for any free port."),
    token_file: Path | None = Option(
        None, help="A file with the token that clients must send.", show_default=f"${_TOKEN}"
    ),
    public: bool = Option(
        False, "--public", help="Serve other machines without a token. Connections are not encrypted."
    ),
    examples: Path | None = Option(
        None, help="A folder with example images for the web page.", show_default="a few built-in images"
    ),
    batch: int = Option(16, min=1, help="Most images in one forward pass."),
    queue: int = Option(64, min=1, help="Most images in progress; further requests get status 503."),
    memory: int | None = Option(
        None, min=1, help="Most memory of each model in MiB: its weights and a batch."
    ),
    deadline: float = Option(10.0, help="Time limit of a request in seconds."),
    decoders: int = Option(2, min=1, help="Processes that decode images."),
    native: bool | None = NATIVE,
    *,
    speed: SpeedOptions,
    opening: ModelOptions,
) -> None:
    """Serve predictions over HTTP, with a web page.

    POST images to /v1/predict, or open the page. By default only this machine can connect. Another --host
    needs a token. On Ctrl-C or SIGTERM the server finishes the requests in progress and stops; a second
    signal stops it at once.
    """
    with require_extra("serve"):
        import h11  # noqa: F401
        import prometheus_client  # noqa: F401

    from vitrail.serve.server_settings import ServeConfig

    config = ServeConfig(
        host=host,
        port=port,
        token=_read_token(token_file),
        public=public,
        batch=batch,
        queue=queue,
        deadline=deadline,
        decoders=decoders,
        model_memory=None if memory is None else memory * 2**20,
    )
    files = parse_models(models)
    if not config.local and config.token is None and not public:
        raise InputError(
            f"--host {host} can be reached from other machines and needs a token; set {_TOKEN} or "
            "--token-file, or --public to serve anyone."
        )

    from vitrail.serve.examples import built_in, from_folder
    from vitrail.serve.server import bind, run_server
    from vitrail.weights.bundle.own_shape import check_native

    with bind(config) as listener:  # fails before the model is loaded if the port is taken
        chosen = None if examples is None else from_folder(examples)
        predictors: dict[str, Predictor] = {}
        for name, path in files.items():
            predictor = opening.predictor(path, speed, native=native)
            if native:
                check_native(predictor.bundle)
            predictors[name or model_name(predictor, path)] = predictor
        if chosen is None:
            first = next(iter(predictors.values()))
            chosen = built_in(first.config.channels, min(first.preprocess.target))
        code = run_server(
            predictors,
            config,
            listener=listener,
            examples=chosen,
            started=lambda address: print(_welcome(predictors, config, address), flush=True),
            ended=_exit_now,
        )
    _exit_now(code)


def _exit_now(code: int) -> None:
    """Exit without waiting for a forward pass whose client is gone."""
    sys.stdout.flush()
    os._exit(code)


def parse_models(models: list[str]) -> dict[str, str]:
    """The models by name; a single one may have none: ""."""
    pairs = []
    for text in models:
        match = None if os.path.exists(text) else _NAMED.fullmatch(text)
        pairs.append((match[1], match[2]) if match else ("", text))
    names = [name for name, _ in pairs]
    if len(pairs) > 1 and ("" in names or len(set(names)) < len(names)):
        raise InputError(
            "Several models need different names of letters, digits, - and _: vitrail serve "
            "pets=pets.safetensors flowers=flowers.safetensors."
        )
    return dict(pairs)


def model_name(predictor: Predictor, model: str) -> str:
    """The name on the model's card, or that of its file or folder, which may be "."."""
    return predictor.card.name or Path(os.path.abspath(model)).stem


def _read_token(path: Path | None) -> str | None:
    """The token from a file or the environment; as an argument, every user of the machine could see it."""
    if path is None:
        return os.environ.get(_TOKEN) or None
    shown = printable(path)
    try:
        token = read_limited(path, _MAX_TOKEN, "a token").decode("utf-8").strip()
    except FileError as error:
        raise InputError(str(error)) from error
    except (OSError, InputError, UnicodeDecodeError) as error:
        message = f"--token-file must name a text file, and {shown} cannot be read as one; name another."
        raise InputError(message) from error
    if not token:
        raise InputError(f"{shown} is empty; write the token to it.")
    return token


def _welcome(predictors: Mapping[str, Predictor], config: ServeConfig, address: str) -> str:
    from vitrail.serve.served_model import fit_memory

    listed = ""
    for name, predictor in predictors.items():
        height, width = predictor.preprocess.target
        classes = "classes by words" if predictor.needs_words else f"{len(predictor.scale.labels):,} classes"
        about = "images in their own shape, about " if predictor.preprocess.keeps_shape else ""
        batch = fit_memory(predictor, config, name).batch
        limit = f", at most {batch} images in a batch (--memory)" if batch < config.batch else ""
        listed += f"{printable(name)}: {classes}, {about}{height}x{width} pixels{limit}\n"
    clients = (
        "clients with the token" if config.token else "this machine only" if config.local else "EVERYONE"
    )
    return (
        f"{listed}{address}  ({clients}; press Ctrl-C to stop)\n"
        f"limits: {config.body // 2**20} MiB per request, {config.pixels // 10**6} megapixels per image, "
        f"{config.queue} images at once, {config.deadline:g} s per request"
    )
