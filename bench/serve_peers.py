"""The servers that bench.serve compares ours with: python -m bench.serve_peers NAME MODEL PORT

`fastapi` is what one writes first: a route that decodes the image and asks the model, one at a time.
`litserve` decodes in its route, too, and gathers up to 16 images. Both use our Predictor and keep freed
memory as our commands do, so that only the serving differs.
"""

import base64
import io
import sys
from typing import Any

import numpy as np
from PIL import Image

from vitrail.cli.malloc import keep_freed_memory
from vitrail.predict import Predictor


def fastapi(model: str, port: int) -> None:
    import uvicorn
    from fastapi import FastAPI, Request
    from starlette.concurrency import run_in_threadpool

    app, predict = FastAPI(), Predictor(model)

    @app.post("/v1/predict")
    async def answer(request: Request) -> Any:  # not as text: FastAPI looks for the class
        data = await request.body()
        found = await run_in_threadpool(lambda: predict(Image.open(io.BytesIO(data))))
        return {"label": found.label, "score": found.score}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


try:
    from litserve import LitAPI, LitServer
except ImportError:  # then it cannot be started either
    LitAPI = object


class Api(LitAPI):  # type: ignore[misc]
    """In LitServe's own process: it takes the class from this module, by its name."""

    model = ""

    def setup(self, device: str) -> None:
        keep_freed_memory()  # this is another process than the one below
        self.ask = Predictor(self.model)

    def decode_request(self, request: dict[str, str]) -> Any:
        image = Image.open(io.BytesIO(base64.b64decode(request["image"])))
        return self.ask.preprocess.pixels(image)

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        return list(self.ask.predict_batch([("", one) for one in x]))

    def unbatch(self, output: Any) -> Any:
        return output

    def encode_response(self, output: Any) -> Any:
        return {"label": output.label, "score": output.score}


def litserve(model: str, port: int) -> None:
    api = Api(max_batch_size=16, batch_timeout=0.01)
    api.model = model
    server = LitServer(api, accelerator="cpu")
    server.run(port=port, host="127.0.0.1", log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    keep_freed_memory()
    {"fastapi": fastapi, "litserve": litserve}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
