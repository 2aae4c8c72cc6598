"""torch.save files: a zip archive with a pickle and the storages of its tensors.

A pickle is a program. `PickleInterpreter` follows it and builds placeholders: nothing that the file names is
imported or called. torch reads a file only after that, so it meets no tensor outside its storage, and a file
is described without torch. torch's own `weights_only` unpickling, on the meta device, is no substitute: of
69 hostile files in our tests it accepts 25, among them tensors outside their storage, and one crashes it.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from vitrail.base.errors import printable
from vitrail.weights.readers.tensor_entries import (
    MAX_HEADER,
    SAVE_AGAIN,
    SIZES,
    Entry,
    MalformedFile,
    Span,
    check_shape,
    read_chunks,
    swap_size,
)

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
    if program.file_size > MAX_HEADER:
        raise MalformedFile(f"its pickle is larger than {MAX_HEADER:,} bytes", SAVE_AGAIN)
    prefix = root + "data/"
    sizes = {name.removeprefix(prefix): m.file_size for name, m in members.items() if name.startswith(prefix)}
    text = b"".join(read_chunks(handle, archive, Span(0, program.file_size, 1, program)))
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
        entries[name], spans[name] = entry, Span(start, stop, swap_size(entry.dtype, order), member)
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


# ---- the pickle -----------------------------------------------------------------------------

_MAX_STEPS = 200_000  # of a pickle; a tensor takes about 30
_MAX_NESTED = 1_000  # open marks; Python's own pickler stays far below

# The only names a file may use. None is imported.
_STORAGES = {
    "torch.DoubleStorage": "float64", "torch.FloatStorage": "float32", "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16", "torch.LongStorage": "int64", "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16", "torch.CharStorage": "int8", "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}  # fmt: skip
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_ORDERED, _SIZE = "collections.OrderedDict", "torch.Size"
_ALLOWED = {*_STORAGES, _TENSOR, _PARAMETER, _ORDERED, _SIZE}

_DISTRUST = "Do not load it another way unless you trust whoever made it; ask them for safetensors."


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class Storage:
    """A placeholder for a storage: a member of the archive."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True)
class StridedTensor:
    """A placeholder for a tensor: a view into a storage of the archive."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _OrderedDict(dict[Any, Any]):
    """An OrderedDict: only it may be given attributes (PyTorch keeps versions there)."""


LIST: Any = object()  # a placeholder for any list; its items are not needed
_OTHER: Any = object()  # a placeholder for the result of a refused name
_CONSTANTS = dict(NONE=None, NEWTRUE=True, NEWFALSE=False, EMPTY_TUPLE=(), EMPTY_LIST=LIST, EMPTY_SET=LIST)


class PickleInterpreter:
    """Interprets one pickle. `sizes` are the bytes of each storage in the archive, by key."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.storages: dict[str, Storage] = {}  # those seen so far
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below each open mark
        self.memo: dict[int, Any] = {}
        self.refused: set[str] = set()
        self.foreign = ""  # an instruction that torch.save does not write

    def run(self, program: bytes) -> Any:
        """What the pickle would build. Refused names are collected, so that the error lists all of them."""
        fault: Exception | None = None
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
                if count >= _MAX_STEPS:
                    raise MalformedFile(f"its pickle has more than {_MAX_STEPS:,} steps")
                self.step(opcode, argument)
        except Exception as error:  # pickletools and the stack fail in many ways on a broken pickle
            fault = error
        if self.refused:
            names = ", ".join(printable(name) for name in sorted(self.refused)[:5])
            more = f" and {len(self.refused) - 5} more" if len(self.refused) > 5 else ""
            raise MalformedFile(f"it wants to run {names}{more}", _DISTRUST)
        if isinstance(fault, MalformedFile):
            raise fault
        if fault or self.below or len(self.stack) != 1:
            raise MalformedFile("its pickle is damaged") from fault
        if self.foreign:
            raise MalformedFile(
                f"its pickle uses {self.foreign}, which torch.save does not write", SAVE_AGAIN
            )
        return self.stack[0]

    def step(self, opcode: Any, argument: Any) -> None:
        stack = self.stack
        match opcode.name:
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "BINUNICODE" | "BININT1" | "BININT2" | "BININT" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "MARK":
                if len(self.below) >= _MAX_NESTED:
                    raise MalformedFile("its pickle is nested too deeply")
                self.below.append(stack)
                self.stack = []
            case "TUPLE":
                items = self.pop_mark()
                self.stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop(int(opcode.name[-1]))))
            case "REDUCE":
                function, arguments = self.pop(2)
                stack.append(self.call(function, arguments))
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "GLOBAL" | "INST" | "STACK_GLOBAL" | "EXT1" | "EXT2" | "EXT4":
                self.push_name(opcode, argument)
            case "BINPERSID":
                stack.append(self.storage(*self.pop(1)))
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                self.set_items(self.pop(2))
            case "SETITEMS":
                self.set_items(self.pop_mark())
            case "APPEND" | "APPENDS":
                self.pop(1) if opcode.name == "APPEND" else self.pop_mark()
                if self.stack[-1] not in (LIST, _OTHER):
                    raise MalformedFile("its pickle adds items to something that is not a list")
            case "BUILD":
                (state,) = self.pop(1)
                if stack[-1] is not _OTHER and not (
                    type(stack[-1]) is _OrderedDict and isinstance(state, dict)
                ):
                    raise MalformedFile("its pickle sets attributes of something that has none")
            case "PROTO" | "STOP":
                if argument not in (2, None):
                    self.foreign = f"protocol {argument}"
            case _:
                self.skip(opcode, argument)

    def pop(self, count: int) -> list[Any]:
        items, self.stack[-count:] = self.stack[-count:], []
        if len(items) < count:
            raise MalformedFile("its pickle is damaged")
        return items

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def push_name(self, opcode: Any, argument: Any) -> None:
        if opcode.name == "STACK_GLOBAL":
            name = ".".join(part if isinstance(part, str) else "?" for part in self.stack[-2:])
        else:  # pickletools gives "module name" with a space between, and a number for EXT
            name = argument.replace(" ", ".") if isinstance(argument, str) else f"extension {argument}"
        if name not in _ALLOWED:
            self.refused.add(name)
        if opcode.name == "GLOBAL":
            self.stack.append(_Global(name) if name in _ALLOWED else _OTHER)
        else:
            self.skip(opcode, None)

    def skip(self, opcode: Any, argument: Any) -> None:
        """Follow an instruction that torch.save does not write, only to find the names after it."""
        self.foreign = self.foreign or opcode.name
        if opcode.name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
            return
        if pickletools.markobject in opcode.stack_before:
            self.pop_mark()
        elif opcode.stack_before:
            self.pop(len(opcode.stack_before))
        result = argument if isinstance(argument, str) else _OTHER
        self.stack.extend(result for _ in opcode.stack_after)

    def call(self, function: Any, arguments: Any) -> Any:
        if function is _OTHER:
            return _OTHER
        name = function.name if isinstance(function, _Global) else ""
        match arguments:
            case () if name == _ORDERED:
                return _OrderedDict()
            case (tuple() as sides,) if name == _SIZE:
                return sides
            case (StridedTensor() as tensor, bool(), _OrderedDict()) if name == _PARAMETER:
                return tensor
            case (Storage(), int(), tuple(), tuple(), bool(), _OrderedDict(), *rest) if name == _TENSOR:
                if rest in ([], [None], [{}]):  # else flags, such as negation of the numbers
                    return _check_view(StridedTensor(*arguments[:4]))
        raise MalformedFile("its pickle calls something in a way that torch.save does not")

    def storage(self, reference: Any) -> Storage:
        match reference:
            case ("storage", _Global(name), str() as key, str(), int() as count) if name in _STORAGES:
                storage = Storage(_STORAGES[name], key, count)
            case _:
                raise MalformedFile("its pickle refers to something that is not a storage")
        size = self.sizes.get(key, 0)
        if size != count * SIZES[storage.dtype] or key not in self.sizes:
            raise MalformedFile(
                f"storage {printable(key)} of {printable(count)} {storage.dtype} has {size:,} bytes"
            )
        if self.storages.setdefault(key, storage) != storage:
            raise MalformedFile(f"storage {printable(key)} is described in two ways")
        return storage

    def set_items(self, items: list[Any]) -> None:
        target: Any = self.stack[-1]
        if not (isinstance(target, dict) or target is _OTHER) or len(items) % 2:
            raise MalformedFile("its pickle sets items of something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True) if target is not _OTHER else ():
            if not isinstance(key, (str, int, float, type(None))):  # hashing deep tuples crashes Python
                raise MalformedFile("its pickle has a dict whose keys are neither text nor numbers")
            target[key] = value


def _check_view(tensor: StridedTensor) -> StridedTensor:
    """Check that a tensor is inside its storage, and not larger than it by repeating elements."""
    check_shape("a tensor", tensor.shape)
    if len(tensor.stride) != len(tensor.shape) or any(type(step) is not int for step in tensor.stride):
        raise MalformedFile("a tensor's strides do not fit its shape")
    size = math.prod(tensor.shape)
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    inside = max(last + 1, size) <= tensor.storage.count if size else tensor.offset <= tensor.storage.count
    if tensor.offset < 0 or min(tensor.stride, default=0) < 0 or not inside:
        raise MalformedFile(f"a tensor reaches outside its storage {printable(tensor.storage.key)}")
    return tensor


def is_contiguous(tensor: StridedTensor) -> bool:
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    return all(n < 2 or a == b for n, a, b in zip(tensor.shape, steps, tensor.stride, strict=True))
