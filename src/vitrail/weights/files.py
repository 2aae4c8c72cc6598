"""Weight files: the only place that opens one, and the only place that writes one.

Its content says what a file is, not its name. Whatever is wrong becomes a FileError that names it.
"""

from __future__ import annotations

import codecs
import json
import os
import secrets
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

import numpy as np

from vitrail.errors import FileError, printable
from vitrail.weights import arrays, pickles
from vitrail.weights.arrays import HEADER_MOST, Bad, Entry, Span, check_shape

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "WeightFile", "open_weights", "write_npz", "write_safetensors"]

StrPath = str | os.PathLike[str]
PARTS_MOST = 200_000  # values in a safetensors header; a tensor takes about ten
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip

MAGIC = {  # how other files begin, and what they are
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


class WeightFile:
    """An open weight file: what is in it, and the tensors when they are asked for.

    Attributes:
        entries: dtype and shape by name, in the file's order. They come from headers alone.
        metadata: the texts that a safetensors file carries.
        wrapper: the key under which a pickle held its tensors, such as "model"; "" if under none.
        others: the usual keys under which it holds tensors too, such as "model_ema".
    """

    def __init__(self, path: Path, handle: IO[bytes], checkpoint_key: str | None = None) -> None:
        self.path, self.handle = path, handle
        self.kind: Literal["safetensors", "npz", "pickle"] = "safetensors"
        self.metadata, self.wrapper, self.others = dict[str, str](), "", list[str]()
        self.loaded: Any = None  # what torch made of a pickle
        self.archive = arrays.open_zip(handle) if is_zip(handle) else None
        if self.archive is not None:
            self.kind = kind_of_zip(self.archive.namelist())
        if checkpoint_key is not None and self.kind != "pickle":
            raise Bad("only a torch.save file has keys to choose from", "Leave out checkpoint_key.")
        if self.archive is None:
            self.entries, self.spans, self.metadata = read_safetensors(handle)
        elif self.kind == "npz":
            self.entries, self.spans = arrays.read_npz(self.archive)
        else:
            read = pickles.read_pickle(handle, self.archive, checkpoint_key)
            self.entries, self.spans, self.wrapper, self.others = read

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """The elements of a tensor, flat and some at a time, in no promised order; bfloat16 as float32.

        Of a scattered tensor in a pickle come all elements of the storage it is scattered over.
        """
        with reading(self.path):
            entry, span = self.find(name)
            for piece in arrays.pieces(self.handle, self.archive, span):
                yield arrays.as_array(entry.dtype, piece)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor with memory of its own, in the file's dtype."""
        with reading(self.path):
            entry, span = self.find(name)
            return self.load(name, entry) if self.kind == "pickle" else self.build(entry, span)

    def find(self, name: str) -> tuple[Entry, Span]:
        if name not in self.entries:
            raise Bad(f"it has no tensor named {printable(name)}", "Its names are in .entries.")
        return self.entries[name], self.spans[name]

    def build(self, entry: Entry, span: Span) -> torch.Tensor:
        import torch

        raw = bytearray()
        for piece in arrays.pieces(self.handle, self.archive, span):
            raw += piece
        dtype = getattr(torch, entry.dtype)
        if not raw:
            return torch.empty(entry.shape, dtype=dtype)
        # Of bools too: a byte that is neither 0 nor 1 would make one that is neither.
        flat = torch.frombuffer(raw, dtype=torch.uint8 if dtype is torch.bool else dtype).to(dtype)
        if span.fortran:
            return flat.reshape(entry.shape[::-1]).permute(*range(len(entry.shape))[::-1]).contiguous()
        return flat.reshape(entry.shape)

    def load(self, name: str, entry: Entry) -> torch.Tensor:
        """torch reads the pickle, all of it, now that it has passed our own check."""
        import torch

        if self.loaded is None:
            self.handle.seek(0)  # the file that was checked, even if another has its name by now
            found = torch.load(self.handle, map_location="cpu", weights_only=True)
            self.loaded = found[self.wrapper] if self.wrapper else found
        tensor = self.loaded[name].detach().clone(memory_format=torch.contiguous_format)
        if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{entry.dtype}", entry.shape):
            raise Bad(f"torch reads {printable(name)} in another way than its pickle says")
        return tensor

    def close(self) -> None:
        self.loaded = None
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path: StrPath, checkpoint_key: str | None = None) -> WeightFile:
    """Open a weight file and read its headers. Use it in a `with`, or close it.

    `checkpoint_key` is the key of a torch.save file under which the tensors are, if not a usual one.
    """
    with reading(path):
        # Without O_NONBLOCK, opening a named pipe would wait for someone to write into it.
        flags = getattr(os, "O_NONBLOCK", 0)
        handle = open(path, "rb", opener=lambda name, given: os.open(name, given | flags))  # noqa: SIM115
        try:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise Bad("it is a pipe or a device, not a file")
            return WeightFile(Path(path), handle, checkpoint_key)
        except BaseException:
            handle.close()
            raise


@contextmanager
def reading(path: StrPath) -> Iterator[None]:
    """Whatever goes wrong while a file is read is said of that file."""
    try:
        yield
    except Exception as error:  # the file decides what fails and how, so no list of errors is complete
        reason, do = f"it is damaged ({printable(error)})", "Download it again, or save it again."
        if isinstance(error, Bad):
            reason, do = error.args
        elif isinstance(error, OSError):
            reason, do = error.strerror or str(error), "Check the path and its permissions."
        must = "The file must be readable, whole and safe."  # not every npz that is read holds weights
        raise FileError(must, f"{printable(path)}: {printable(reason, 1000)}", do) from error


def is_zip(handle: IO[bytes]) -> bool:
    """Whether a file is a zip archive, and not safetensors, by its first bytes. Others are refused."""
    head = handle.read(512)
    lead, brace = head.lstrip().lower(), head[8:9] == b"{"
    if brace and head[4:8] == bytes(4):  # first, since a header's length can look like any magic
        return False
    if head.startswith(b"PK\3\4"):
        return True
    what = next((MAGIC[magic] for magic in MAGIC if head.startswith(magic) or lead.startswith(magic)), "")
    if not what and lead and is_text(head, strict=brace):
        what = "JSON text" if lead[:1] in b"{[" else "text"
    if brace and not (what and is_text(head)):  # a length that is not true is said to be so
        return False
    what = what or ("a TensorFlow Lite model" if head[4:8] == b"TFL3" else "nothing this program knows")
    raise Bad(f"it is {what if head else 'empty'}", "Give a safetensors, npz or torch.save file.")


def is_text(head: bytes, *, strict: bool = True) -> bool:
    """Whether the first bytes of a file are text: UTF-8, or unless `strict` another encoding."""
    if strict and codecs.utf_8_decode(head, "replace", False)[0].count("\ufffd"):
        return False
    return all((byte >= 32 and byte != 127) or byte in b"\t\r\n" for byte in head)


def kind_of_zip(names: list[str]) -> Literal["npz", "pickle"]:
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise Bad("it is a TorchScript program, not weights", pickles.SAVE_AGAIN)
    if any(name.endswith("/data.pkl") for name in names):
        return "pickle"
    if other := next((name for name in names if not name.endswith(".npy")), "" if names else "it is empty"):
        raise Bad(f"it is a zip archive, but not of arrays: {printable(other)}", pickles.SAVE_AGAIN)
    return "npz"


def read_safetensors(handle: IO[bytes]) -> tuple[dict[str, Entry], dict[str, Span], dict[str, str]]:
    """The header: a length, then JSON that must account for every byte after it."""
    size = handle.seek(0, os.SEEK_END)
    handle.seek(0)
    length = int.from_bytes(handle.read(8), "little")
    if length > min(HEADER_MOST, size - 8):
        raise Bad(f"it claims a header of {length:,} bytes, in a file of {size:,} (at most {HEADER_MOST:,})")
    text = handle.read(length)
    if sum(map(text.count, (b",", b"[", b"{"))) > PARTS_MOST:
        raise Bad(f"its header has more than {PARTS_MOST:,} parts")
    header = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=whole, parse_int=whole)
    metadata = header.pop("__metadata__", {})
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise Bad("its metadata are not texts by name")
    entries, places = {}, []
    for name, info in header.items():
        match info:
            case {"dtype": str(code), "shape": shape, "data_offsets": [int(start), int(stop)]}:
                if code not in SAFETENSORS or bool in (type(start), type(stop)):
                    raise Bad(f"{printable(name)} has a dtype or place that is not one: {printable(code)}")
                entries[name] = entry = Entry(SAFETENSORS[code], check_shape(printable(name), shape))
                places.append((start, stop, name))
                if stop - start != entry.bytes:
                    raise Bad(f"{printable(name)} claims {entry.bytes:,} bytes and has {stop - start:,}")
            case _:
                raise Bad(f"{printable(name)} has no dtype, shape and data_offsets")
    spans, end, base = {}, 0, 8 + length
    for start, stop, name in sorted(places):
        if start != end:
            raise Bad(f"{printable(name)} overlaps another tensor, or leaves a gap before it")
        spans[name] = Span(base + start, base + stop, arrays.swap_of(entries[name].dtype, "little"))
        end = stop
    if base + end != size:
        raise Bad(f"its tensors need {base + end:,} bytes and the file has {size:,}")
    return entries, spans, metadata


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of two values under one key, readers choose differently, so there may be none."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Bad(f"its header has a name twice: {printable(twice(pairs), 80)}")
    "".join(part for pair in pairs for part in pair if isinstance(part, str)).encode()  # no half characters
    return found


def twice(pairs: list[tuple[str, Any]]) -> str:
    """The name that comes most often."""
    return Counter(name for name, _ in pairs).most_common(1)[0][0]


def whole(text: str) -> int:
    if not text.isdigit() or len(text) > 20:
        raise Bad(f"its header has {printable(text)} where a whole number must be")
    return int(text)


@contextmanager
def writing(path: StrPath) -> Iterator[Path]:
    """A temporary file that takes the place of `path` once it is whole and on the disk."""
    target = Path(os.path.realpath(path))  # a link stays one
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        if target.exists() and not target.is_file():
            raise OSError("It is not a file")  # os.replace would take the place of a device too
        part.touch(exist_ok=False)
        mode = part.stat().st_mode  # the umask's; safetensors makes a file for its owner alone
        yield part
        part.chmod(mode)
        with part.open("rb+") as handle:
            WeightFile(part, handle)  # what is written can be read
            os.fsync(handle.fileno())
        os.replace(part, target)
        with suppress(OSError):  # not every system can put a folder on the disk; the file is there
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except Exception as error:
        reason = error.args[0] if isinstance(error, Bad) else getattr(error, "strerror", None) or error
        do = "Check the folder, the free space and the tensors; an older file of that name is as it was."
        got = f"{printable(path)}: {printable(reason)}"
        raise FileError("A weight file must be written whole.", got, do) from error
    finally:
        with suppress(OSError):
            part.unlink()


def write_safetensors(
    path: StrPath, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors. Those that share memory are written once for each name."""
    with writing(path) as part:
        from safetensors.torch import save_file

        seen, plain = set(), {}
        for name, tensor in tensors.items():
            found = tensor.detach().cpu().contiguous()
            home = found.untyped_storage().data_ptr()
            plain[name] = found.clone() if home in seen else found
            seen.add(home)
        save_file(plain, part, dict(metadata) if metadata else None)


def write_npz(path: StrPath, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, uncompressed."""
    with writing(path) as part, zipfile.ZipFile(part, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
