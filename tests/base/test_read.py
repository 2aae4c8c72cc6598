"""Reading files that a user names: regular files only, with size limits, and strict JSON."""

import os

import pytest

from vitrail.base.errors import FileError, InputError
from vitrail.base.safe_files import open_regular, parse_json, read_limited


def test_regular_files_and_links_to_them(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"123"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


def test_pipes_devices_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(InputError, match="a pipe or a device, and an image must be a regular file"):
            open_regular(path, "an image")
    with pytest.raises(InputError, match="is a folder"):
        open_regular(tmp_path)


def test_large_files_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    assert len(read_limited(tmp_path / "a", 1000)) == 1000
    with pytest.raises(FileError, match=r"a is larger than 999 bytes, too large for a config"):
        read_limited(tmp_path / "a", 999, "a config")


def test_valid_json():
    assert parse_json(b'{"a": [1, 2.5, null, "\xc3\xa4"]}', "x.json") == {"a": [1, 2.5, None, "ä"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', r"x.json is not valid JSON: .* at line 2, column 6"),
        ('{"a": 1, "a": 2}', r"the key 'a' appears twice"),
        ('{"a": NaN}', r"NaN is not a JSON number"),
        ("[-Infinity]", r"-Infinity is not a JSON number"),
        ("[" * 100_000, r"is not valid JSON"),
        (b"\xff\xfe\x00", r"is not valid JSON"),
    ],
    ids=["syntax", "duplicate", "NaN", "infinity", "nesting", "encoding"],
)
def test_invalid_json(text, message):
    with pytest.raises(FileError, match=message):
        parse_json(text, "x.json")
