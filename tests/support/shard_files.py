"""Tar shards as other tools write them: key.jpg and key.cls, in WebDataset's layout."""

import io
import tarfile
from pathlib import Path


def add_member(tar, name, data=b"", **fields):
    """Append a member; `fields` are those of tarfile.TarInfo."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data) if info.isreg() else None)


def write_tar(path, members):
    """A tar of (name, bytes) pairs, or of (name, bytes, fields)."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data, *fields in members:
            add_member(tar, name, data, **(fields[0] if fields else {}))
    return path


def shard_folder(folder: Path, out: Path, count=3, label=str):
    """The files of a folder with a folder for each class, in their order, in some shards."""
    out.mkdir(parents=True)
    files = sorted(file for file in folder.rglob("*.*") if file.is_file())
    classes = sorted({file.parent.name for file in files})
    size = -(-len(files) // count)
    for number in range(count):
        members = []
        for file in files[number * size : (number + 1) * size]:
            name = file.relative_to(folder).as_posix()
            text = label(file.parent.name) if label is str else label(classes.index(file.parent.name))
            members += [(name, file.read_bytes()), (f"{name.rpartition('.')[0]}.cls", str(text).encode())]
        write_tar(out / f"pets-{number:03}.tar", members)
    return out
