"""Weight files: the only module that opens and writes them.

A file's content decides what it is, not its name. Whatever is wrong becomes a FileError that names the file.
"""

from __future__ import annotations

import codecs
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from vitrail.base.errors import FileError, VitrailError, printable
from vitrail.base.safe_files import atomic_file, folder_beside, open_regular
from vitrail.weights.readers.pickles import read_pickle
from vitrail.weights.readers.tensor_entries import (
    Entry,
    MalformedFile,
    Span,
    as_array,
    kind_of_zip,
    open_zip,
    read_chunks,
    read_npz,
    read_safetensors,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "WeightFile", "open_weights", "write_npz", "write_safetensors"]

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

StrPath = str | os.PathLike[str]


class WeightFile(AbstractContextManager["WeightFile"]):
    """An open weight file: its headers, and its tensors on request.

    Attributes:
        entries: dtype and shape by name, in the file's order. They come from headers alone.
        metadata: the strings that a safetensors file carries.
        wrapper: the key under which a torch.save file holds its tensors, such as "model"; "" if none.
        others: the usual keys under which it also holds tensors, such as "model_ema".
    """

    def __init__(
        self,
        path: Path,
        handle: IO[bytes],
        checkpoint_key: str | None = None,
        skip: Collection[str] = (),
    ) -> None:
        self.path, self.handle = path, handle
        self.kind: Literal["safetensors", "npz", "pickle"] = "safetensors"
        self.metadata, self.wrapper, self.others = dict[str, str](), "", list[str]()
        self._loaded: Any = None  # the state dict, once torch has read the pickle
        self.archive = open_zip(handle) if is_zip(handle) else None
        if self.archive is not None:
            self.kind = kind_of_zip(self.archive.namelist())
        if checkpoint_key is not None and self.kind != "pickle":
            raise MalformedFile("only a torch.save file has keys to choose from", "Leave out checkpoint_key.")
        if self.archive is None:
            self.entries, self.spans, self.metadata = read_safetensors(handle)
        elif self.kind == "npz":
            self.entries, self.spans = read_npz(self.archive, skip)
        else:
            contents = read_pickle(handle, self.archive, checkpoint_key)
            self.entries, self.spans, self.wrapper, self.others = contents

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the elements of a tensor in flat pieces, in no particular order; bfloat16 as float32.

        For a tensor that is not contiguous in a pickle, all elements of its storage are yielded.
        """
        with _reading(self.path):
            entry, span = self._find(name)
            for chunk in read_chunks(self.handle, self.archive, span):
                yield as_array(entry.dtype, chunk)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor with memory of its own, in the file's dtype."""
        with _reading(self.path):
            entry, span = self._find(name)
            return self._unpickle(name, entry) if self.kind == "pickle" else self._read(entry, span)

    def _find(self, name: str) -> tuple[Entry, Span]:
        if name not in self.entries:
            raise MalformedFile(f"it has no tensor named {printable(name)}", "Its names are in .entries.")
        return self.entries[name], self.spans[name]

    def _read(self, entry: Entry, span: Span) -> torch.Tensor:
        import torch

        raw = bytearray()
        for chunk in read_chunks(self.handle, self.archive, span):
            raw += chunk
        dtype = getattr(torch, entry.dtype)
        if not raw:
            return torch.empty(entry.shape, dtype=dtype)
        # Bools too: a byte that is neither 0 nor 1 would make an invalid one.
        flat = torch.frombuffer(raw, dtype=torch.uint8 if dtype is torch.bool else dtype).to(dtype)
        if span.fortran:
            return flat.reshape(entry.shape[::-1]).permute(*range(len(entry.shape))[::-1]).contiguous()
        return flat.reshape(entry.shape)

    def _unpickle(self, name: str, entry: Entry) -> torch.Tensor:
        """Let torch read the whole pickle, now that it has passed our own check."""
        import torch

        if self._loaded is None:
            self.handle.seek(0)  # the file that was checked, even if another has its name by now
            contents = torch.load(self.handle, map_location="cpu", weights_only=True)
            self._loaded = contents[self.wrapper] if self.wrapper else contents
        tensor = self._loaded[name].detach().clone(memory_format=torch.contiguous_format)
        if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{entry.dtype}", entry.shape):
            raise MalformedFile(f"torch reads {printable(name)} differently from what its pickle describes")
        return tensor

    def close(self) -> None:
        self._loaded = None
        self.handle.close()

    def __exit__(self, *_: object) -> None:
        self.close()


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


def open_weights(
    path: StrPath, checkpoint_key: str | None = None, *, skip: Collection[str] = ()
) -> WeightFile:
    """Open a weight file and read its headers. Use it in a `with`, or close it.

    Args:
        checkpoint_key: the key of a torch.save file that holds the tensors, if not a usual one.
        skip: arrays of an npz to leave out, such as text beside the numbers.
    """
    with _reading(path):
        handle = open_regular(Path(path), "a weight file")
        try:
            return WeightFile(Path(path), handle, checkpoint_key, skip)
        except BaseException:
            handle.close()
            raise


@contextmanager
def _reading(path: StrPath) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into a FileError that names it."""
    try:
        yield
    except VitrailError as error:
        raise FileError(str(error)) from error
    except Exception as error:  # the file decides what fails and how, so no list of errors is complete
        reason, do = f"it is damaged ({printable(error)})", "Download it again, or save it again."
        if isinstance(error, MalformedFile):
            reason, do = error.args
        elif isinstance(error, OSError):
            reason, do = error.strerror or str(error), "Check the path and its permissions."
        raise FileError(f"{printable(path)} cannot be read: {printable(reason, 1000)}. {do}") from error


@contextmanager
def _writing(path: StrPath) -> Iterator[Path]:
    """A temporary file that replaces `path` once it is complete, readable and on the disk."""
    try:
        with atomic_file(Path(path), overwrite=True, check=_check_readable) as partial:
            yield partial
    except Exception as error:
        reason: Any = error
        if isinstance(error, MalformedFile):
            reason = error.args[0]
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise FileError(
            f"{printable(path)} cannot be written: {printable(reason)}. Check the folder, the free space and "
            "the tensors; an existing file of that name is unchanged."
        ) from error


def _check_readable(path: Path) -> None:
    with path.open("rb") as handle:
        WeightFile(path, handle)


def write_safetensors(
    path: StrPath, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors; an existing file is replaced. Tensors that share memory are written once per name."""
    with _writing(path) as partial:
        from safetensors.torch import save_file

        seen, plain = set(), {}
        for name, tensor in tensors.items():
            tensor = tensor.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            plain[name] = tensor.clone() if storage in seen else tensor
            seen.add(storage)
        with folder_beside(partial) as folder:  # killed, safetensors would leave its own temporary file
            save_file(plain, folder / partial.name, dict(metadata) if metadata else None)
            os.replace(folder / partial.name, partial)


def write_npz(path: StrPath, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, uncompressed; an existing file is replaced."""
    with _writing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
