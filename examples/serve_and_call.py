"""Start `vitrail serve`, send it an image over HTTP, and read the prediction."""

import io
import json
import subprocess
import sys
import time
import urllib.request

from PIL import Image
from sklearn.datasets import load_digits

import vitrail as vt

vt.train("digits", out="runs/served", recipe="digits", epochs=3, report=False)

PORT = 8765
command = [sys.executable, "-m", "vitrail", "serve", "runs/served/best.safetensors", "--port", str(PORT)]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
try:
    for _ in range(100):  # wait until it is ready
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz")
            break
        except OSError:
            time.sleep(0.3)

    digits = load_digits()
    file = io.BytesIO()
    Image.fromarray((digits.images[0] * 255 / 16).astype("uint8")).save(file, format="PNG")
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/predict?top=3",
        data=file.getvalue(),
        headers={"Content-Type": "image/png"},
    )
    with urllib.request.urlopen(request) as response:
        (prediction,) = json.load(response)["predictions"]
    print(f"the digit {digits.target[0]} is predicted as {prediction['label']} ({prediction['score']:.0%})")
finally:
    server.terminate()  # it finishes what it has accepted, then exits with 0
    server.wait()
