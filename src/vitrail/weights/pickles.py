"""PyTorch's zip-and-pickle files, read without running them.

A pickle is a program. `Machine` follows it and builds placeholders: nothing that the file names is
imported or called. torch reads a file only after that, so it meets no tensor outside its storage.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from vitrail.errors import printable
from vitrail.weights import arrays
from vitrail.weights.arrays import SIZES, Bad, Entry, Span

STEPS_MOST = 200_000  # of a pickle; a tensor takes about 30
NESTED_MOST = 1_000  # marks open at once; Python's own pickler does not get there

# The only names a file may use. None is looked up.
STORAGES = {
    "torch.DoubleStorage": "float64", "torch.FloatStorage": "float32", "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16", "torch.LongStorage": "int64", "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16", "torch.CharStorage": "int8", "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}  # fmt: skip
TENSOR, PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
ORDERED, SIZE = "collections.OrderedDict", "torch.Size"
ALLOWED = {*STORAGES, TENSOR, PARAMETER, ORDERED, SIZE}

# Where training scripts keep the weights among other things; the first that is there is taken, and said
# where there are others. The averages (EMA) come last: who wants them gives checkpoint_key.
WRAPPERS = (
    *("model", "state_dict", "model_state_dict", "model_state", "network", "network_state_dict"),
    *("net", "net_state_dict", "module", "weights", "params", "teacher", "student"),
    *("model_ema", "state_dict_ema", "model_ema_state_dict", "ema", "ema_model", "ema_state_dict"),
)

SAVE_AGAIN = "Save the state dict again: torch.save(model.state_dict(), path)."
DISTRUST = "Do not load it in another way unless you trust whoever made it; ask them for safetensors."


@dataclass(frozen=True)
class Global:
    name: str


@dataclass(frozen=True)
class Storage:
    dtype: str
    key: str
    count: int


@dataclass(frozen=True)
class Strided:
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Ordered(dict[Any, Any]):
    """An OrderedDict: it alone may be given attributes (PyTorch keeps versions there)."""


LIST: Any = object()  # a list, whose items nobody needs
OTHER: Any = object()  # what a refused name would make
CONSTANTS = dict(NONE=None, NEWTRUE=True, NEWFALSE=False, EMPTY_TUPLE=(), EMPTY_LIST=LIST, EMPTY_SET=LIST)


class Machine:
    """Follows one pickle. `sizes` are the bytes of each storage in the archive, by key."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.storages: dict[str, Storage] = {}  # those met so far
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each open mark
        self.memo: dict[int, Any] = {}
        self.refused: set[str] = set()
        self.foreign = ""  # an instruction that torch.save does not write

    def run(self, program: bytes) -> Any:
        """What the pickle would make. A refused name does not end the walk: all of them are told."""
        fault: Exception | None = None
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
                if count >= STEPS_MOST:
                    raise Bad(f"its pickle has more than {STEPS_MOST:,} steps")
                self.step(opcode, argument)
        except Exception as error:  # pickletools and the stack fail in many ways on a broken pickle
            fault = error
        if self.refused:
            names = ", ".join(printable(name) for name in sorted(self.refused)[:5])
            more = f" and {len(self.refused) - 5} more" if len(self.refused) > 5 else ""
            raise Bad(f"this file asks to run {names}{more}", DISTRUST)
        if isinstance(fault, Bad):
            raise fault
        if fault or self.below or len(self.stack) != 1:
            raise Bad("its pickle is damaged") from fault
        if self.foreign:
            raise Bad(f"its pickle uses {self.foreign}, which torch.save does not write", SAVE_AGAIN)
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
                if len(self.below) >= NESTED_MOST:
                    raise Bad("its pickle is nested too deep")
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
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case "GLOBAL" | "INST" | "STACK_GLOBAL" | "EXT1" | "EXT2" | "EXT4":
                self.name(opcode, argument)
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
                if self.stack[-1] not in (LIST, OTHER):
                    raise Bad("its pickle adds items to something that is not a list")
            case "BUILD":
                (state,) = self.pop(1)
                if stack[-1] is not OTHER and not (type(stack[-1]) is Ordered and isinstance(state, dict)):
                    raise Bad("its pickle sets attributes of something that has none")
            case "PROTO" | "STOP":
                if argument not in (2, None):
                    self.foreign = f"protocol {argument}"
            case _:
                self.skip(opcode, argument)

    def pop(self, count: int) -> list[Any]:
        items, self.stack[-count:] = self.stack[-count:], []
        if len(items) < count:
            raise Bad("its pickle is damaged")
        return items

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def name(self, opcode: Any, argument: Any) -> None:
        if opcode.name == "STACK_GLOBAL":
            name = ".".join(part if isinstance(part, str) else "?" for part in self.stack[-2:])
        else:  # pickletools gives "module name" with a space between, and a number for EXT
            name = argument.replace(" ", ".") if isinstance(argument, str) else f"extension {argument}"
        if name not in ALLOWED:
            self.refused.add(name)
        if opcode.name == "GLOBAL":
            self.stack.append(Global(name) if name in ALLOWED else OTHER)
        else:
            self.skip(opcode, None)

    def skip(self, opcode: Any, argument: Any) -> None:
        """An instruction that torch.save does not write. It is followed only to find names after it."""
        self.foreign = self.foreign or opcode.name
        if opcode.name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
            return
        if pickletools.markobject in opcode.stack_before:
            self.pop_mark()
        elif opcode.stack_before:
            self.pop(len(opcode.stack_before))
        made = argument if isinstance(argument, str) else OTHER
        self.stack.extend(made for _ in opcode.stack_after)

    def call(self, function: Any, arguments: Any) -> Any:
        if function is OTHER:
            return OTHER
        name = function.name if isinstance(function, Global) else ""
        match arguments:
            case () if name == ORDERED:
                return Ordered()
            case (tuple() as sides,) if name == SIZE:
                return sides
            case (Strided() as tensor, bool(), Ordered()) if name == PARAMETER:
                return tensor
            case (Storage(), int(), tuple(), tuple(), bool(), Ordered(), *rest) if name == TENSOR:
                if rest in ([], [None], [{}]):  # else marks that say: read the numbers negated, or so
                    return check_view(Strided(*arguments[:4]))
        raise Bad("its pickle calls something in a way that torch.save does not")

    def storage(self, given: Any) -> Storage:
        match given:
            case ("storage", Global(name), str() as key, str(), int() as count) if name in STORAGES:
                found = Storage(STORAGES[name], key, count)
            case _:
                raise Bad("its pickle refers to something that is not a storage")
        have = self.sizes.get(key, 0)
        if have != count * SIZES[found.dtype] or key not in self.sizes:
            raise Bad(f"storage {printable(key)} of {printable(count)} {found.dtype} has {have:,} bytes")
        if self.storages.setdefault(key, found) != found:
            raise Bad(f"storage {printable(key)} is described in two ways")
        return found

    def set_items(self, items: list[Any]) -> None:
        target: Any = self.stack[-1]
        if not (isinstance(target, dict) or target is OTHER) or len(items) % 2:
            raise Bad("its pickle sets items of something that has none")
        for key, value in zip(items[::2], items[1::2], strict=True) if target is not OTHER else ():
            if not isinstance(key, (str, int, float, type(None))):  # hashing deep tuples breaks Python
                raise Bad("its pickle has a dict whose keys are neither text nor numbers")
            target[key] = value


def check_view(tensor: Strided) -> Strided:
    """A tensor must lie within its storage, and not be larger than it by repeating elements."""
    arrays.check_shape("a tensor", tensor.shape)
    if len(tensor.stride) != len(tensor.shape) or any(type(step) is not int for step in tensor.stride):
        raise Bad("a tensor's strides do not fit its shape")
    size = math.prod(tensor.shape)
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    inside = max(last + 1, size) <= tensor.storage.count if size else tensor.offset <= tensor.storage.count
    if tensor.offset < 0 or min(tensor.stride, default=0) < 0 or not inside:
        raise Bad(f"a tensor reaches outside its storage {printable(tensor.storage.key)}")
    return tensor


def is_contiguous(tensor: Strided) -> bool:
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    return all(n < 2 or a == b for n, a, b in zip(tensor.shape, steps, tensor.stride, strict=True))


Contents = tuple[dict[str, Entry], dict[str, Span], str, list[str]]


def read_pickle(handle: IO[bytes], archive: zipfile.ZipFile, key: str | None) -> Contents:
    """The tensors of a torch.save file, the key under which they are, and other keys with tensors."""
    members = {member.filename: member for member in archive.infolist()}
    root = next(name for name in members if name.endswith("/data.pkl")).removesuffix("data.pkl")
    check_layout(handle, archive, root)
    program = members[root + "data.pkl"]
    if program.file_size > arrays.HEADER_MOST:
        raise Bad(f"its pickle is larger than {arrays.HEADER_MOST:,} bytes", SAVE_AGAIN)
    prefix = root + "data/"
    sizes = {name.removeprefix(prefix): m.file_size for name, m in members.items() if name.startswith(prefix)}
    text = b"".join(arrays.pieces(handle, archive, Span(0, program.file_size, 1, program)))
    wrapper, tensors, others = choose(Machine(sizes).run(text), key)
    mark = members.get(root + "byteorder")
    order = "big" if mark and mark.file_size < 10 and archive.read(mark) == b"big" else "little"
    entries, spans = {}, {}
    for name, tensor in tensors.items():
        entry = Entry(tensor.storage.dtype, tensor.shape)
        member = members[prefix + tensor.storage.key]
        start, stop = 0, member.file_size  # of a scattered tensor, all that it is scattered over
        if is_contiguous(tensor):
            start = tensor.offset * SIZES[entry.dtype]
            stop = start + entry.bytes
        entries[name], spans[name] = entry, Span(start, stop, arrays.swap_of(entry.dtype, order), member)
    return entries, spans, wrapper, others


def choose(top: Any, key: str | None = None) -> tuple[str, dict[str, Strided], list[str]]:
    """The state dict: what the file holds, or holds under the given key or one of the usual ones.

    Tensors beside a known key that holds more of them, such as a loss beside "model", are not the weights.
    """
    if not isinstance(top, dict):
        what = {Strided: "one tensor", tuple: "a tuple", str: "a text"}.get(type(top), "something else")
        raise Bad(f"it holds {'a list' if top is LIST else what}, not a dict of tensors", SAVE_AGAIN)
    held = {name: tensors for name, inner in top.items() if (tensors := tensors_in(inner))}
    shown = ", ".join(printable(one, 40) for one in list(top)[:10]) or "none"
    if key is not None:
        if key not in held:
            raise Bad(
                f"it holds no tensors under {printable(key)}; its keys are: {shown}", "Give one of them."
            )
        return key, held[key], []
    known = [name for name in WRAPPERS if name in held]
    plain = tensors_in(top)
    if plain and all(len(held[name]) <= len(plain) for name in known):
        return "", plain, []
    if known:
        return known[0], held[known[0]], known[1:]
    for name in held:
        if isinstance(name, str):
            do = f"If {printable(name, 40)} holds the weights, give checkpoint_key={printable(name, 40)}."
            raise Bad(f"its tensors are under none of the usual keys; its keys are: {shown}", do)
    raise Bad(f"there are no tensors in it; its keys are: {shown}", SAVE_AGAIN)


def tensors_in(held: Any) -> dict[str, Strided]:
    items = held.items() if isinstance(held, dict) else ()
    return {name: tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, Strided)}


def check_layout(handle: IO[bytes], archive: zipfile.ZipFile, root: str) -> None:
    """An archive laid out as torch.save does it, so that torch's zip reader sees what ours has seen."""
    names = archive.namelist()
    if len({name.casefold() for name in names}) < len(names):  # torch looks them up in either case
        raise Bad("its archive has two members whose names differ only in case")
    for member in archive.infolist():
        if not member.filename.startswith(root) or root.count("/") != 1 or member.compress_type:
            what = "compressed" if member.compress_type else "in another folder"
            raise Bad(f"its member {printable(member.filename)} is {what}", SAVE_AGAIN)
    size = handle.seek(0, 2)
    handle.seek(max(0, size - 98))
    tail = handle.read(98)
    # The end record, and before it, in an archive for large files, a longer one and a pointer to it.
    directory = int.from_bytes(tail[-6:-2], "little")
    if tail[-42:-38] == b"PK\6\7":
        pointer = int.from_bytes(tail[-34:-26], "little")
        directory = int.from_bytes(tail[48:56], "little") if pointer == size - 98 else -1
    if tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0" or directory != archive.start_dir:
        raise Bad("its archive does not end as torch.save ends one", SAVE_AGAIN)
