"""`vitrail serve`: a model that is asked over HTTP, with a page to look inside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli import facts as options
from vitrail.errors import InputError, needs, printable

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.settings import ServeConfig

TOKEN = "VITRAIL_TOKEN"
LONGEST_TOKEN = 4096  # bytes of its file


def serve(
    model: Annotated[
        str, typer.Argument(help="A weight file, a folder with one, hf:owner/name, or an .onnx file.")
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 for all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help=f"A file with the token that clients must send; or set {TOKEN}.")
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Whoever reaches it may ask. Nothing is encrypted."),
    ] = False,
    examples: Annotated[
        Path | None, typer.Option(help="A folder of pictures that the page offers, instead of its own.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="The most pictures in the model at once.")] = 16,
    queue: Annotated[int, typer.Option(min=1, help="The most pictures inside; more must come again.")] = 64,
    deadline: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 10.0,
    decoders: Annotated[int, typer.Option(min=1, help="Processes that decode images.")] = 2,
    device: Annotated[str | None, typer.Option(help="Where the model runs, such as cuda.")] = None,
    size: options.Size = None,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Answer requests over HTTP: POST pictures to /v1/predict, or open the page.

    Only this machine can ask, unless --host says otherwise; then a token is needed. Ctrl-C or SIGTERM lets
    everybody who is inside have an answer; a second one stops at once.
    """
    with needs("serve"):
        import h11  # noqa: F401

    from vitrail.serve.settings import ServeConfig

    settings = ServeConfig(
        host=host,
        port=port,
        token=read_token(token_file),
        public=public,
        batch=batch,
        queue=queue,
        deadline=deadline,
        decoders=decoders,
    )
    if not settings.local and settings.token is None and not public:
        do = f"Set {TOKEN} or --token-file; or say --public, if everybody may ask."
        raise InputError("A server that other machines reach needs a token.", f"--host {host}", do)

    from vitrail.predict import Predictor
    from vitrail.serve.examples import built_in, from_folder
    from vitrail.serve.server import bind, run

    with bind(settings) as listener:  # what is wrong is said before anything slow
        offered = None if examples is None else from_folder(examples)
        predictor = Predictor(model, **options.facts(family, keys, given, size, device=device))
        name = name_of(predictor, model)
        code = run(
            predictor,
            settings,
            listener=listener,
            name=name,
            examples=built_in(predictor.config.channels, min(predictor.preprocess.target))
            if offered is None
            else offered,
            started=lambda address: print(welcome(predictor, settings, name, address), flush=True),
            ended=leave,
        )
    leave(code)


def leave(code: int) -> None:
    """At once: the model, if it is still computing for a client who has gone, must not hold us up."""
    sys.stdout.flush()
    os._exit(code)


def name_of(predictor: Predictor, model: str) -> str:
    """As its card has it, or its file or folder, which may be "."."""
    return predictor.card.name or Path(os.path.abspath(model)).stem


def read_token(path: Path | None) -> str | None:
    """From a file or the environment: on a command line every user of the machine would see it."""
    if path is None:
        return os.environ.get(TOKEN) or None
    shown = printable(path)
    try:
        if not path.is_file():  # a device may have no end
            raise OSError
        with path.open("rb") as file:
            found = file.read(LONGEST_TOKEN + 1)
        token = found.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = f"--token-file must name a text file, and {shown} cannot be read as one; name another."
        raise InputError(message) from error
    if len(found) > LONGEST_TOKEN:
        raise InputError(
            f"A token may have {LONGEST_TOKEN:,} bytes, and {shown} has more; make a shorter one."
        )
    if not token:
        raise InputError(f"{shown} is empty; put the token in it.")
    return token


def welcome(predictor: Predictor, settings: ServeConfig, name: str, address: str) -> str:
    high, wide = predictor.preprocess.target
    who = "anybody with the token" if settings.token else "this machine" if settings.local else "ANYBODY"
    return (
        f"{printable(name)}: {len(predictor.scale.labels):,} classes, {high}x{wide} pixels\n"
        f"{address}  (for {who}; Ctrl-C stops)\n"
        f"at most {settings.body // 2**20} MiB and {settings.pixels // 10**6} megapixels, "
        f"{settings.queue} pictures inside, {settings.deadline:g} s"
    )
