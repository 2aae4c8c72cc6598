"""Recognizing weight files by their first bytes, whatever their name."""

from __future__ import annotations

import codecs
from typing import IO, Literal

from vitrail.base.errors import printable
from vitrail.weights.readers.npz import MalformedFile
from vitrail.weights.readers.unpickle import SAVE_AGAIN

_MAGIC = {  # the first bytes of other files, and what they are
    b"version https://git-lfs": "a Git LFS pointer, not the weights; `git lfs pull` fetches those",
    b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9": "from a PyTorch before 1.6; save it again with a newer one",
    b"\x80": "a plain pickle, which is a program and not weights",
    b"\x93NUMPY": "a single numpy array (npy), which has no tensor names",
    b"GGUF": "a GGUF file", b"\x89HDF": "an HDF5 file (Keras?)", b"PK\5\6": "an empty zip archive",
    b"\x1f\x8b": "a gzip file", b"BZh": "a bzip2 file", b"\xfd7zXZ": "an xz file",
    b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"%PDF": "a PDF document",
    b"<!doctype": "a web page: the link gave a page instead of the file", b"<html": "a web page",
    b"\x08": "perhaps an ONNX model",
}  # fmt: skip


def is_zip(handle: IO[bytes]) -> bool:
    """Whether a file is a zip archive (else safetensors), by its first bytes. Others are refused."""
    head = handle.read(512)
    lead, brace = head.lstrip().lower(), head[8:9] == b"{"
    if brace and head[4:8] == bytes(4):  # first, since a header's length can look like any magic
        return False
    if head.startswith(b"PK\3\4"):
        return True
    what = next((_MAGIC[magic] for magic in _MAGIC if head.startswith(magic) or lead.startswith(magic)), "")
    if not what and lead and _is_text(head, strict=brace):
        what = "JSON text" if lead[:1] in b"{[" else "text"
    if brace and not (what and _is_text(head)):  # safetensors with a wrong length, reported as such
        return False
    what = what or ("a TensorFlow Lite model" if head[4:8] == b"TFL3" else "of an unknown format")
    raise MalformedFile(f"it is {what if head else 'empty'}", "Pass a safetensors, npz or torch.save file.")


def _is_text(head: bytes, *, strict: bool = True) -> bool:
    """Whether the first bytes of a file are text: UTF-8, or any encoding unless `strict`."""
    if strict and codecs.utf_8_decode(head, "replace", False)[0].count("\ufffd"):
        return False
    return all((byte >= 32 and byte != 127) or byte in b"\t\r\n" for byte in head)


def kind_of_zip(names: list[str]) -> Literal["npz", "pickle"]:
    """Whether an archive with these members is an npz or a torch.save file. Others are refused."""
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise MalformedFile("it is a TorchScript program, not weights", SAVE_AGAIN)
    if any(name.endswith("/data.pkl") for name in names):
        return "pickle"
    if other := next((name for name in names if not name.endswith(".npy")), "" if names else "it is empty"):
        raise MalformedFile(f"it is a zip archive, but not of arrays: {printable(other)}", SAVE_AGAIN)
    return "npz"
