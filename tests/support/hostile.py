"""Malicious and malformed files that must be refused. None of them is ever executed.

    files = hostile_files(folder)    # {"pickle reduce": folder/..., ...}

A pickle that is executed would create the file `canary` in the folder.
"""

import io
import json
import os
import struct
import zipfile
import zlib
from functools import cache
from pathlib import Path

# ---- PyTorch archives ---------------------------------------------------------------------------

STORAGE = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpuK\4tQ"  # four float32
HOOKS = b"ccollections\nOrderedDict\n)R"


def text(string):
    data = string.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    raw = value.to_bytes(17, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values):
    return b"(" + b"".join(number(value) for value in values) + b"t"


def tensor(offset=0, shape=(4,), stride=(1,), storage=STORAGE, after=b""):
    """The instructions that build one tensor."""
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return (
        rebuild
        + storage
        + number(offset)
        + numbers(shape)
        + numbers(stride)
        + b"\x89"
        + HOOKS
        + after
        + b"tR"
    )


def state(value, name="w"):
    """A complete pickle: {name: value}."""
    return b"\x80\2}" + text(name) + value + b"s."


def archive(program, members=None, deflated=(), root="archive", extra=()):
    """What torch.save would write around a pickle; its one storage has four float32."""
    members = {"data/0": bytes(16)} if members is None else members
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        for name, data in {"data.pkl": program, "byteorder": b"little", **members, "version": b"3\n"}.items():
            kind = zipfile.ZIP_DEFLATED if name in deflated else zipfile.ZIP_STORED
            zipped.writestr(zipfile.ZipInfo(f"{root}/{name}"), data, compress_type=kind)
        for name, data in extra:
            zipped.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def pickles(canary):
    """Everything that a pickle can do and weights do not need."""
    touch = f"touch {canary}"
    python = f"open({str(canary)!r}, 'w')"
    call = text(touch) + b"\x85R"
    good = tensor()
    floats = b"(X\7\0\0\0storagectorch\n%s\nX\1\0\0\0%sX\3\0\0\0cpu%stQ"
    yield "reduce", archive(state(b"cposix\nsystem\n" + call)), "wants to run posix.system"
    yield "eval", archive(state(b"cbuiltins\neval\n" + text(python) + b"\x85R")), "builtins.eval"
    yield (
        "after a good tensor",
        archive(b"\x80\2}" + text("w") + good + b"scos\nsystem\n" + call + b"0."),
        "os.system",
    )
    yield "stack global", archive(state(text("os") + text("system") + b"\x93" + call)), "os.system"
    yield (
        "stack global memo",
        archive(b"\x80\4" + text("os") + b"\x94" + text("system") + b"\x94h\0h\1\x93" + call + b"."),
        "os.system",
    )
    yield "inst", archive(state(b"(" + text(touch) + b"ios\nsystem\n")), "os.system"
    yield "obj", archive(state(b"(cos\nsystem\n" + text(touch) + b"o")), "os.system"
    yield "newobj", archive(state(b"csubprocess\nPopen\n" + text(touch) + b"\x85\x81")), "subprocess.Popen"
    yield (
        "newobj ex",
        archive(state(b"csubprocess\nPopen\n" + text(touch) + b"\x85}\x92")),
        "subprocess.Popen",
    )
    yield (
        "build",
        archive(state(b"ctorch.nn.modules.linear\nLinear\n)R}" + text("__setstate__") + b"cos\nsystem\nsb")),
        "os.system, torch.nn.modules.linear.Linear",
    )
    yield "build on a dict", archive(state(b"}}" + text("items") + b"K\1sb")), "sets attributes"
    yield "build on a tensor", archive(state(good + b"(K\1K\2tb")), "sets attributes"
    yield "items of a tensor", archive(state(good + b"K\0K\1s")), "sets items"
    yield "append to a dict", archive(state(b"}K\1a")), "not a list"
    yield "ext", archive(state(b"\x82\1)R")), "extension 1"
    yield "persid", archive(state(b"Pnonsense\n")), "PERSID"
    yield "binpersid", archive(state(text("nonsense") + b"Q")), "not a storage"
    yield "persid of a module", archive(state(b"(X\6\0\0\0moduleK\1K\2tQ")), "not a storage"
    yield (
        "six names",
        archive(state(b"".join(b"cm%d\nf\n)R0" % n for n in range(7)) + b"N")),
        "m4.f and 2 more",
    )
    yield (
        "numpy scalar",
        archive(state(b"cnumpy.core.multiarray\nscalar\n)R")),
        "numpy.core.multiarray.scalar",
    )
    yield "name with escapes", archive(state(b"cos\nsy\x1b[31mstem\n)R")), "os.sy\\x1b[31mstem"
    yield "no call", archive(state(STORAGE + b")R")), "calls something"
    yield "storage called", archive(state(b"ctorch\nFloatStorage\nK\1\x85R")), "calls something"
    yield "marks", archive(b"\x80\2" + b"(" * 100_000 + b"."), "nested too deep"
    yield "lists", archive(b"\x80\2" + b"](" * 100_000 + b"."), "nested too deep"
    yield "lists in lists", archive(b"\x80\2" + b"]" * 99_000 + b"a" * 98_999 + b"."), "holds a list"
    yield "tuples", archive(b"\x80\2}" + b")" + b"\x85" * 190_000 + b"K\1s."), "keys are neither"
    yield "tuple only", archive(b"\x80\2)" + b"\x85" * 199_900 + b"."), "holds a tuple"
    yield "steps", archive(b"\x80\2" + b"N0" * 700_000 + b"N."), "200,000 steps"
    yield "dicts", archive(b"\x80\2" + b"}" * 199_990 + b"."), "damaged"
    yield (
        "memo",
        archive(b"\x80\2" + b"".join(b"}r" + struct.pack("<I", n) for n in range(99_900)) + b"."),
        "damaged",
    )
    laughs = b"".join(b"(" + b"h%c" % n * 10 + b"tq%c" % (n + 1) for n in range(200))  # 10 ** 200 at the end
    yield "laughs", archive(b"\x80\2)q\0" + laughs + b"."), "damaged"
    yield "memo miss", archive(b"\x80\2h\7."), "damaged"
    yield "pop of nothing", archive(b"\x80\2\x86."), "damaged"
    yield "no stop", archive(b"\x80\2}"), "damaged"
    yield "unknown step", archive(b"\x80\2}\xff."), "damaged"
    yield "long number", archive(b"\x80\2I" + b"9" * 500_000 + b"\n."), "damaged"
    yield "long text", archive(b"\x80\2" + text("x" * 1_500_000 + "\U0001f600") + b"."), "holds a string"
    yield "large pickle", archive(b"\x80\2" + b"N0" * 2_000_000 + b"N."), "larger than"
    yield "protocol 4", archive(b"\x80\4}" + text("w") + good + b"s."), "protocol 4"
    yield "empty", archive(b"\x80\2}."), "holds no tensors; its keys are: none"
    yield "no tensors", archive(b"\x80\2}" + text("epoch") + b"K\3s."), "its keys are: epoch"
    yield "one tensor", archive(b"\x80\2" + good + b"."), "holds one tensor"
    yield "storage size", archive(state(good), {"data/0": bytes(8)}), "has 8 bytes"
    yield "storage too large", archive(state(good), {"data/0": bytes(32)}), "has 32 bytes"
    yield "storage missing", archive(state(good), {}), "has 0 bytes"
    two = (
        text("w")
        + good
        + b"s"
        + text("v")
        + tensor(shape=(2,), storage=floats % (b"DoubleStorage", b"0", b"K\2"))
    )
    yield "storage in two ways", archive(b"\x80\2}" + two + b"s."), "two ways"
    giant = floats % (b"FloatStorage", b"0", number(2**70))
    yield "storage giant", archive(state(tensor(storage=giant))), "has 16 bytes"
    yield "offset", archive(state(tensor(offset=1))), "outside its storage"
    yield "offset negative", archive(state(tensor(offset=-1))), "outside its storage"
    yield "offset giant", archive(state(tensor(offset=2**64))), "outside its storage"
    yield "offset empty", archive(state(tensor(offset=2**62, shape=(0,)))), "outside its storage"
    yield "stride negative", archive(state(tensor(offset=3, stride=(-1,)))), "outside its storage"
    yield "stride giant", archive(state(tensor(stride=(2**62,)))), "outside its storage"
    yield "stride zero", archive(state(tensor(shape=(2**40,), stride=(0,)))), "outside its storage"
    yield "stride missing", archive(state(tensor(shape=(2, 2)))), "strides do not fit"
    yield "shape negative", archive(state(tensor(shape=(-4,)))), "non-negative integers"
    yield "shape giant", archive(state(tensor(shape=(2**62, 2**62), stride=(1, 1)))), "larger than any"
    yield "negated", archive(state(tensor(after=b"}" + text("neg") + b"\x88s"))), "calls something"
    yield "deflated storage", archive(state(good), {"data/0": bytes(50 << 20)}, {"data/0"}), "is compressed"
    yield "deflated pickle", archive(state(good), deflated={"data.pkl"}), "is compressed"
    yield "two pickles", archive(state(good), extra=[("archive/DATA.PKL", b"x")]), "differ only in case"
    yield (
        "two of a name",
        archive(state(good), extra=[("archive/dat_.pkl", state(good))]).replace(b"dat_", b"data"),
        "two members named",
    )
    yield "another folder", archive(state(good), extra=[("other/data/1", b"")]), "another folder"
    yield "points outside", archive(state(good), extra=[("archive/../x", b"")]), "points outside"
    yield "two ends", archive(state(good)) + b"PK\5\6" + bytes(18), "it is empty"
    yield "comment", archive(state(good))[:-2] + b"\5\0hello", "does not end as"
    yield "in front", b"PK\3\4" + archive(state(good)), ""
    yield "torchscript", archive(state(good), {"data/0": bytes(16), "constants.pkl": b"x"}), "TorchScript"
    yield "truncated", archive(state(good))[:-40], "zip"
    yield "half", archive(state(good))[:200], "zip"
    broken = bytearray(archive(state(good)))
    broken[60] ^= 1
    yield "checksum", bytes(broken), "CRC"


# ---- npz ----------------------------------------------------------------------------------------


def npy(descr="'<f4'", shape="(4,)", order="False", data=bytes(16), version=1):
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(header))
        + header
        + data
    )


def npz(*members, kind=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as zipped:
        for name, data in members:
            zipped.writestr(name, data)
    return out.getvalue()


def nested(depth, middle=""):
    return "(" * depth + middle + ")" * depth


def arrays():
    yield "lying header", npz(("w.npy", npy(shape="(8589934592,)"))), "claims 34,359,738,368 bytes and has 16"
    yield "overflow", npz(("w.npy", npy(shape=f"({2**62}, {2**62})"))), "larger than any"
    yield (
        "zero and overflow",
        npz(("w.npy", npy(shape=f"(0, {2**62}, {2**62})", data=b""))),
        "larger than any",
    )
    yield "negative", npz(("w.npy", npy(shape="(-4,)"))), "not an array of plain numbers"
    yield "not a shape", npz(("w.npy", npy(shape="4"))), "list of non-negative integers"
    yield "true", npz(("w.npy", npy(shape="(4, True)"))), "list of non-negative integers"
    yield "digits", npz(("w.npy", npy(shape="(" + "9" * 9000 + ",)"))), ""
    yield "deep header", npz(("w.npy", npy(shape=nested(4000)))), "not an array of plain numbers"
    yield "minus signs", npz(("w.npy", npy(shape="-" * 9000 + "1"))), "not an array of plain numbers"
    yield "long header", npz(("w.npy", npy(shape="(4,)" + " " * 20_000))), "10,000 bytes"
    yield "giant header", npz(("w.npy", b"\x93NUMPY\2\0\xff\xff\xff\xff" + bytes(100))), "10,000 bytes"
    yield (
        "objects",
        npz(("w.npy", npy("'|O'", data=b"cos\nsystem\n(S'true'\ntR."))),
        "plain numbers but of '|O'",
    )
    yield "structured", npz(("w.npy", npy("[('a', '<f4')]"))), "not an array of plain numbers"
    yield "strings", npz(("w.npy", npy("'<U1'"))), "plain numbers but of '<U1'"
    yield "no magic", npz(("w.npy", b"hello")), "not a numpy array"
    yield "member of another kind", npz(("w.npy", npy()), ("run.sh", b"x")), "not of arrays: run.sh"
    yield "absolute", npz(("/etc/w.npy", npy())), "points outside"
    yield (
        "two of a name",
        npz(("a.npy", npy()), ("b.npy", npy())).replace(b"b.npy", b"a.npy"),
        "two members named",
    )
    bomb = npy(shape=f"({64 << 20},)", descr="'|u1'", data=bytes(64 << 20))
    yield "bomb", npz(("w.npy", bomb), kind=zipfile.ZIP_DEFLATED), "1,000 times its size"
    yield "lzma", npz(("w.npy", npy(data=bytes(16))), kind=zipfile.ZIP_LZMA), "unusual way"
    yield "encrypted", encrypted(npz(("w.npy", npy()))), "encrypted"
    yield "overlap", overlapping(), "overlaps another"
    many = npz(*((f"{n}.npy", b"") for n in range(20_000)))
    yield "members", many, "zip directory"
    yield "members without end", npz(*((f"{n}.npy", b"") for n in range(9_000))), "not a numpy array"


def encrypted(data):
    flags = data.rindex(b"PK\1\2") + 8
    return data[:flags] + b"\1" + data[flags + 1 :]


def overlapping():
    """A second name for the first member, only in the zip directory."""
    data = npz(("a.npy", npy()))
    start, end = data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    entry = data[start:end]
    tail = bytearray(data[end:])
    struct.pack_into("<HHI", tail, 8, 2, 2, 2 * len(entry))
    return data[:end] + entry.replace(b"a.npy", b"b.npy") + bytes(tail)


# ---- safetensors --------------------------------------------------------------------------------


def safetensors(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def info(start=0, stop=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def headers():
    body = json.dumps(info())[1:-1]
    sixteen = bytes(16)
    yield (
        "duplicate",
        safetensors(f'{{"w": {{{body}}}, "w": {{{body}}}}}'.encode(), sixteen),
        "a duplicate name",
    )
    yield (
        "duplicate inside",
        safetensors(f'{{"w": {{{body}, "dtype": "F32"}}}}'.encode(), sixteen),
        "a duplicate name",
    )
    yield (
        "duplicate metadata",
        safetensors(f'{{"__metadata__": {{"a": "1", "a": "2"}}, "w": {{{body}}}}}'.encode(), sixteen),
        "a duplicate name",
    )
    yield "overlap", safetensors({"a": info(), "b": info(8, 24)}, bytes(24)), "overlaps another"
    yield "same place", safetensors({"a": info(), "b": info()}, sixteen), "overlaps another"
    yield "hole", safetensors({"a": info(), "b": info(20, 36)}, bytes(36)), "gap before it"
    yield "hole in front", safetensors({"a": info(4, 20)}, bytes(20)), "gap before it"
    yield "trailing", safetensors({"a": info()}, bytes(17)), "the file has"
    yield "truncated", safetensors({"a": info()}, bytes(15)), "the file has"
    yield "length", safetensors({"a": info()}, sixteen, 2**63), "claims a header of 9,223,372,036,854,775,808"
    yield "length of the file", safetensors({"a": info()}, b"", 200), "claims a header"
    yield "long header", safetensors(b"{" + b" " * (3 << 20) + b"}"), "claims a header"
    yield "overflow", safetensors({"a": info(shape=(2**40, 2**40))}, sixteen), "larger than any"
    yield "zero overflow", safetensors({"a": info(0, 0, shape=(0, 2**62, 2**62))}), "larger than any"
    yield "size", safetensors({"a": info(shape=(2**33,))}, sixteen), "claims 34,359,738,368 bytes and has 16"
    yield "backwards", safetensors({"a": info(16, 0)}, sixteen), "has -16"
    yield "negative", safetensors({"a": info(-16, 0)}, b""), "instead of an integer"
    yield "shape of true", safetensors({"a": info(shape=(4, True))}, sixteen), "non-negative integers"
    yield "offset of true", safetensors({"a": info(False, 1, (), "U8")}, b"x"), "invalid dtype or offset"
    yield "shape of floats", safetensors({"a": info(shape=(4.0,))}, sixteen), "non-negative integers"
    yield "dtype", safetensors({"a": info(dtype="F31")}, sixteen), "F31"
    yield "dtype of a list", safetensors({"a": info(dtype=["F32"])}, sixteen), "no dtype"
    yield "not an object", safetensors({"a": 3}), "no dtype"
    yield "no object", safetensors(b'{"a": 1} []'), "damaged"
    yield "metadata", safetensors({"__metadata__": {"a": 1}}), "metadata are not strings"
    yield "metadata of a list", safetensors({"__metadata__": []}), "metadata are not strings"
    yield "nesting", safetensors(b'{"a":' + b"[" * 150_000), "damaged"
    yield "objects nested", safetensors(b'{"a":' * 150_000), "damaged"
    yield "objects", safetensors(b'{"a":[' + b"{}," * 500_000 + b"{}]}"), "parts"
    yield "texts", safetensors(b'{"a":[' + b'"abc",' * 190_000 + b"{}]}"), "no dtype"
    yield (
        "wide text",
        safetensors(json.dumps({"__metadata__": {"a": "\U0001f600" + "x" * 1_500_000}}).encode() + b"x"),
        "damaged",
    )
    wide = '{"__metadata__": {"a": "' + "\U0001f600" + "x" * 1_500_000 + '"} x'
    yield "wide characters", safetensors(wide.encode()), "damaged"
    yield "utf-8", safetensors(b'{"\xff\xfe": {' + body.encode() + b"}}", sixteen), "utf-8"
    yield "half a character", safetensors(b'{"\\ud800": {' + body.encode() + b"}}", sixteen), "surrogates"
    yield (
        "nan",
        safetensors(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}', sixteen),
        "NaN",
    )
    long = b'{"a": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 16]}}'
    yield "long number", safetensors(long, sixteen), "instead of an integer"
    yield "not json", safetensors(b"{hello}"), "damaged"
    yield "no brace", safetensors(b' {"a": 1}'), "of an unknown format"
    yield "name with escapes", safetensors({"\x1b[2J\u202ew": 1}), "\\x1b[2J\\u202ew"


# ---- everything else ----------------------------------------------------------------------------


def others():
    yield "empty", b"", "it is empty"
    yield "text", b"hello, these are no weights\n", "it is text"
    yield "json", b'{"hidden_size": 768}', "JSON text"
    yield "json brace", b'[[[[[[[[{"hidden_size": 768}]]]]]]]]', "JSON text"
    yield "html", b"\n<!DOCTYPE html><html>", "a web page"
    yield "lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n", "Git LFS pointer"
    yield "png", b"\x89PNG\r\n\x1a\n" + bytes(20), "PNG"
    yield "jpeg", b"\xff\xd8\xff\xe0" + bytes(20), "JPEG"
    yield "gzip", zlib.compress(bytes(9), wbits=31), "gzip"
    yield "hdf5", b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5"
    yield "gguf", b"GGUF" + bytes(20), "GGUF"
    yield "tflite", b"\x1c\0\0\0TFL3" + bytes(20), "TensorFlow Lite"
    yield "onnx", b"\x08\x07\x12\x07pytorch" + bytes(20), "ONNX"
    yield "zeros", bytes(2000), "of an unknown format"
    yield "one byte", b"\0", "of an unknown format"
    yield "npy", npy(), "a single numpy array"
    yield "plain pickle", b"\x80\4cos\nsystem\n.", "plain pickle"
    yield "text pickle", b"cos\nsystem\n(S'true'\ntR.", "text"
    yield "legacy torch", b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\2M\xe9\3.", "PyTorch before 1.6"
    yield "empty zip", npz(), "empty zip"
    yield "docx", npz(("word/document.xml", b"x")), "not of arrays: word/document.xml"


def recipes(canary):
    """Yield (name, bytes, a part of the error message)."""
    kinds = {"pickle": pickles(canary), "npz": arrays(), "safetensors": headers(), "other": others()}
    for kind, files in kinds.items():
        for name, data, message in files:
            yield f"{kind} {name}", data, message


def hostile_files(folder):
    """Write all files and return their paths by name."""
    folder = Path(folder)
    paths = {}
    for name, data, _ in recipes(folder / "canary"):
        paths[name] = folder / (name.replace(" ", "_") + ".bin")
        paths[name].write_bytes(data)
    paths["path fifo"] = folder / "fifo"
    os.mkfifo(paths["path fifo"])
    paths["path folder"] = folder / "folder.safetensors"
    paths["path folder"].mkdir()
    paths["path missing"] = folder / "missing.safetensors"
    paths["path device"] = Path("/dev/null")
    paths["path escapes"] = folder / "w\x1b[31m\u202e.safetensors"
    paths["path escapes"].write_bytes(b"text")
    return paths


@cache
def error_messages():
    """A part of the error message for each file."""
    messages = {name: message for name, _, message in recipes(Path("canary"))}
    return messages | {
        "path fifo": "is a pipe or a device",
        "path folder": "is a folder",
        "path missing": "No such file",
        "path device": "a pipe or a device",
        "path escapes": "w\\x1b[31m\\u202e.safetensors cannot be read: it is text",
    }
