"""A decoder that obeys images: what no limit of `decode` can prevent."""

import sys

from serving import picture

# A decoder process in which an image does what its last bytes say.
OBEDIENT = """
import os, time
from vitrail.serve import decode_worker, images
usual = images.decode
def decode(file, *more, **options):
    word = bytes(file.getvalue()[-4:])
    while word == b"spin":
        pass
    if word == b"nap.":
        time.sleep(0.6)
    if word == b"die.":
        os.abort()
    if word == b"eat.":
        held = []
        while True:
            held.append(b"x" * 2**24)
    return usual(file, *more, **options)
images.decode = decode
decode_worker.main()
"""
COMMAND = [sys.executable, "-c", OBEDIENT]


def told(word):
    """A good image with a word for the decoder above."""
    return picture() + {"spin": b"spin", "nap": b"nap.", "die": b"die.", "eat": b"eat."}[word]
