"""torch.save files: a zip archive with a pickle and the storages of its tensors."""

from __future__ import annotations

import zipfile
from typing import IO, Any

from vitrail.base.errors import printable
from vitrail.weights.readers import npz as arrays
from vitrail.weights.readers.npz import SIZES, Entry, MalformedFile, Span
from vitrail.weights.readers.unpickle import LIST, SAVE_AGAIN, PickleInterpreter, StridedTensor, is_contiguous

# The keys under which training scripts keep the weights. The first one present is read, and a note names the
# others. Averaged weights (EMA) come last: checkpoint_key selects them.
_WRAPPERS = (
    *("model", "state_dict", "model_state_dict", "model_state", "network", "network_state_dict"),
    *("net", "net_state_dict", "module", "weights", "params", "teacher", "student"),
    *("model_ema", "state_dict_ema", "model_ema_state_dict", "ema", "ema_model", "ema_state_dict"),
)


_Contents = tuple[dict[str, Entry], dict[str, Span], str, list[str]]


def read_pickle(handle: IO[bytes], archive: zipfile.ZipFile, key: str | None) -> _Contents:
    """Entries and spans of a torch.save file, the key that holds them, and other keys with tensors."""
    members = {member.filename: member for member in archive.infolist()}
    root = next(name for name in members if name.endswith("/data.pkl")).removesuffix("data.pkl")
    _check_layout(handle, archive, root)
    program = members[root + "data.pkl"]
    if program.file_size > arrays.MAX_HEADER:
        raise MalformedFile(f"its pickle is larger than {arrays.MAX_HEADER:,} bytes", SAVE_AGAIN)
    prefix = root + "data/"
    sizes = {name.removeprefix(prefix): m.file_size for name, m in members.items() if name.startswith(prefix)}
    text = b"".join(arrays.read_chunks(handle, archive, Span(0, program.file_size, 1, program)))
    wrapper, tensors, others = _find_state_dict(PickleInterpreter(sizes).run(text), key)
    mark = members.get(root + "byteorder")
    order = "big" if mark and mark.file_size < 10 and archive.read(mark) == b"big" else "little"
    entries, spans = {}, {}
    for name, tensor in tensors.items():
        entry = Entry(tensor.storage.dtype, tensor.shape)
        member = members[prefix + tensor.storage.key]
        start, stop = 0, member.file_size  # of a tensor that is not contiguous, all of its storage
        if is_contiguous(tensor):
            start = tensor.offset * SIZES[entry.dtype]
            stop = start + entry.bytes
        entries[name], spans[name] = entry, Span(start, stop, arrays.swap_size(entry.dtype, order), member)
    return entries, spans, wrapper, others


def _find_state_dict(top: Any, key: str | None = None) -> tuple[str, dict[str, StridedTensor], list[str]]:
    """The key of the state dict ("" for the top level), the state dict, and other usual keys with tensors.

    Tensors beside a usual key that holds more of them, such as a loss beside "model", are not the weights.
    """
    if not isinstance(top, dict):
        what = {StridedTensor: "one tensor", tuple: "a tuple", str: "a string"}.get(
            type(top), "something else"
        )
        raise MalformedFile(
            f"it holds {'a list' if top is LIST else what}, not a dict of tensors", SAVE_AGAIN
        )
    held = {name: tensors for name, inner in top.items() if (tensors := _tensors_in(inner))}
    shown = ", ".join(printable(one, 40) for one in list(top)[:10]) or "none"
    if key is not None:
        if key not in held:
            raise MalformedFile(
                f"it holds no tensors under {printable(key)}; its keys are: {shown}", "Pass one of them."
            )
        return key, held[key], []
    usual = [name for name in _WRAPPERS if name in held]
    plain = _tensors_in(top)
    if plain and all(len(held[name]) <= len(plain) for name in usual):
        return "", plain, []
    if usual:
        return usual[0], held[usual[0]], usual[1:]
    for name in held:
        if isinstance(name, str):
            do = f"If {printable(name, 40)} holds the weights, pass checkpoint_key={printable(name, 40)}."
            raise MalformedFile(f"its tensors are not under a usual key; its keys are: {shown}", do)
    raise MalformedFile(f"it holds no tensors; its keys are: {shown}", SAVE_AGAIN)


def _tensors_in(held: Any) -> dict[str, StridedTensor]:
    items = held.items() if isinstance(held, dict) else ()
    return {
        name: tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, StridedTensor)
    }


def _check_layout(handle: IO[bytes], archive: zipfile.ZipFile, root: str) -> None:
    """Check that torch.save could have written the archive, so that torch's zip reader agrees with ours."""
    names = archive.namelist()
    if len({name.casefold() for name in names}) < len(names):  # torch ignores case
        raise MalformedFile("its archive has two members whose names differ only in case")
    for member in archive.infolist():
        if not member.filename.startswith(root) or root.count("/") != 1 or member.compress_type:
            what = "compressed" if member.compress_type else "in another folder"
            raise MalformedFile(f"its member {printable(member.filename)} is {what}", SAVE_AGAIN)
    size = handle.seek(0, 2)
    handle.seek(max(0, size - 98))
    tail = handle.read(98)
    # The end record, and before it, in an archive for large files, a longer one and a pointer to it.
    directory = int.from_bytes(tail[-6:-2], "little")
    if tail[-42:-38] == b"PK\6\7":
        pointer = int.from_bytes(tail[-34:-26], "little")
        directory = int.from_bytes(tail[48:56], "little") if pointer == size - 98 else -1
    if tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0" or directory != archive.start_dir:
        raise MalformedFile("its archive does not end as one written by torch.save", SAVE_AGAIN)
