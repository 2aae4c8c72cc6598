"""A decoder process that misbehaves on command, to test what the limits of `decode` cannot prevent."""

import sys

from tests.support.serving import make_image

# A decoder process in which the last bytes of an image are a command.
COMMANDED = """
import os, time
from vitrail.serve import (decode_worker)
original = decode_worker.decode_image
def decode(file, *more, **options):
    word = bytes(file.getvalue()[-4:])
    while word == b"spin":
        pass
    if word == b"nap.":
        time.sleep(0.6)
    if word == b"die.":
        os.abort()
    if word == b"eat.":
        blocks = []
        while True:
            blocks.append(b"x" * 2**24)
    return original(file, *more, **options)
decode_worker.decode_image = decode
decode_worker.main()
"""
COMMAND = [sys.executable, "-c", COMMANDED]


def image_that(word):
    """A valid image that makes the decoder above do something: spin, nap, die or eat memory."""
    return make_image() + {"spin": b"spin", "nap": b"nap.", "die": b"die.", "eat": b"eat."}[word]
