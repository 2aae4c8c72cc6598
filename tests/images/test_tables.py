"""Tables of images: what is read, and errors with the line number."""

import json
import os
import time

import pytest

from vitrail.base.errors import InputError
from vitrail.images.formats.sources import open_dataset

HEAD = "path,label\n"
ROWS = "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(6))


def write(folder, name, text):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def names(split):
    return list(split.names)


# ---- what is read ------------------------------------------------------------------------------


def test_a_table(tmp_path):
    """A byte order mark, quotes, numeric labels in numeric order, and splits."""
    text = "﻿path,label,split,note\n"
    rows = [("x/1.png", 10, ""), ('"a, b.png"', 2, "train"), ("3.png", 2, "VAL"), ("/abs/4.png", 10, "test")]
    (tmp_path / "set.csv").write_text(text + "".join(f"{p},{n},{s},-\n" for p, n, s in rows))
    data = open_dataset(tmp_path / "set.csv")
    assert (data.name, data.classes) == ("set", ["2", "10"])
    assert [str(p) for p in data.train.paths] == [f"{tmp_path}/x/1.png", f"{tmp_path}/a, b.png"]
    assert data.train.labels.tolist() == [1, 0]
    assert names(data.val) == ["3.png"]
    assert [str(p) for p in data.test.paths] == ["/abs/4.png"]
    assert any("1 rows of set.csv have no split" in note for note in data.notes)


def test_a_multi_label_table(tmp_path):
    lines = [
        dict(image=f"{i}.png", labels=labels)
        for i, labels in enumerate([["sea", "sky"], [], ["sky"], ["sun"]] * 3)
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    data = open_dataset(tmp_path / "set.jsonl")
    assert data.multilabel
    assert data.classes == ["sea", "sky", "sun"]
    found = {
        name: row.tolist()
        for s in (data.train, data.val)
        for name, row in zip(s.names, s.labels, strict=True)
    }
    assert [found[f"{i}.png"] for i in range(4)] == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert len(data.val) == 4  # one of each kind of three
    (tmp_path / "set.csv").write_text("file,class\na.png,sea|sky\nb.png,sun\nc.png,sun\n")
    data = open_dataset(tmp_path / "set.csv")
    assert data.train.labels.shape == (2, 3)


@pytest.mark.parametrize(
    "text",
    [
        HEAD + ROWS,
        "﻿" + HEAD + ROWS,
        (HEAD + ROWS).replace("\n", "\r\n"),
        (HEAD + ROWS).replace("\n", "\r"),
        "\n\n" + (HEAD + ROWS).replace("\n", "\n\n"),
        " Path , LABEL \n" + ROWS.replace(",", " , "),
        (HEAD + ROWS).rstrip("\n"),
        "path,label,,\n" + ROWS.replace("\n", ",,\n"),  # columns without a name, as spreadsheets write them
    ],
    ids=["plain", "mark", "crlf", "cr", "blank lines", "blanks", "no last end", "nameless"],
)
def test_the_same_table_in_all_common_forms(text, tmp_path):
    data = open_dataset(write(tmp_path, "t.csv", text))
    assert sorted([*names(data.train), *names(data.val)]) == [f"{i}.png" for i in range(6)]
    assert data.classes == ["a", "b"]


def test_labels_with_thousands_of_digits_are_strings(tmp_path):
    (tmp_path / "t.csv").write_text(
        "path,label\n" + "".join(f"{i}.png,{'9' * 5000 if i % 2 else 3}\n" for i in range(8))
    )
    assert open_dataset(tmp_path / "t.csv").classes == ["3", "9" * 5000]


def test_labels_of_the_same_number_are_in_a_fixed_order(tmp_path):
    """A set has no order, and Python's strings hash differently in every process."""
    labels = ["1", "01", "001", "0001", "00001", "000001"]
    text = HEAD + "".join(f"{i}.png,{labels[i % 6]}\n" for i in range(24))
    assert open_dataset(write(tmp_path, "t.csv", text)).classes == sorted(labels)


def test_two_columns_that_could_be_the_label(tmp_path):
    text = "path,class,label\n" + "".join(f"{i}.png,x,{i % 2}\n" for i in range(6))
    assert open_dataset(write(tmp_path, "t.csv", text)).notes[0] == "The column label is used, and not class."


def test_labels_that_only_val_has_are_noted(tmp_path):
    text = "path,label,split\n1.png,a,train\n2.png,b,train\n3.png,c,val\n"
    notes = open_dataset(write(tmp_path, "t.csv", text)).notes
    assert any(note.startswith("One class has no training image: c.") for note in notes)


# ---- errors ------------------------------------------------------------------------------------

CSV = {
    "empty": ("", r"t\.csv is empty; .* path and label"),
    "blank": ("\n\n", r"t\.csv is empty"),
    "header alone": (HEAD, r"no rows after its header"),
    "no path": ("where,label\n1.png,a\n", r"line 1: the column path or image is missing; found: where, label"),
    "no label": ("\n\npath,kind\n1.png,a\n", r"line 3: the column label or labels is missing"),
    "semicolons": ("path;label\n1.png;a\n", r"line 1: .*path;label.* separate the columns with commas"),
    "column twice": ("path,label,Label\n1.png,a,b\n", r"line 1: .* 'label' twice"),
    "label empty": (HEAD + "1.png,a\n2.png,\n", r"t\.csv, line 3: a label is missing"),
    "label between": (HEAD + "1.png,a\n2.png,a||b\n", r"line 3: a label is missing or empty"),
    "path empty": (HEAD + "1.png,a\n\n ,b\n", r"t\.csv, line 4: the path is missing"),
    "short row": (HEAD + "1.png,a\n2.png\n", r"line 3: the row has 1 value, and the header has 2 columns"),
    "short, but path and label": ("path,label,split\n1.png,a\n", r"line 2: the row has 2 values, .* 3 columns"),
    "long row": (HEAD + "1.png,a\n2.png,b,c\n", r"line 3: the row has 3 values, and the header has 2"),
    "long row, empty": (HEAD + "1.png,a,\n", r"line 2: the row has 3 values"),
    "after lines in quotes": ('path,label,note\n1.png,a,"x\ny\nz"\n2.png,a\n', r"line 5: the row has 2 values"),
    "split": ("path,label,split\n1.png,a,train\n2.png,a,trian\n", r"line 3: the split is 'trian'; .* train, val or test"),
    "test alone": ("path,label,split\n1.png,a,test\n", r"has images of test but none of train"),
    "open quote": (HEAD + '1.png,a\n"2.png,a\n3.png,b\n', r"line 3: a quote is opened here and never closed"),
    "open quote, then another": (HEAD + '"1.png,a\n"2.png",b\n', r"line 3: text follows a closing quote.* begins in line 2"),
    "quote inside": (HEAD + '1.png,a\n"2"x.png,a\n', r"line 3: text follows a closing quote"),
    "long value": (HEAD + "1.png,a\n2.png," + "x" * 200_000 + "\n", r"line 3: a value has more than 131,072 characters"),
    "long open quote": (HEAD + '1.png,a\n"2.png,a\n' + "3.png,b\n" * 20_000, r"line 3: a value has more than .* a quote"),
    "NUL": (HEAD + "1.png,a\n2\0.png,b\n", r"line 3: it contains a NUL byte"),
    "latin-1": ((HEAD + "1.png,a\ncafé.png,b\n").encode("latin-1"), r"line 3: the byte 0xe9 after 3 characters is not UTF-8"),
    "cut character": ((HEAD + "1.png,é").encode()[:-1], r"line 2: the byte 0xc3"),
    "UTF-16": ((HEAD + ROWS).encode("utf-16"), r"t\.csv is encoded in UTF-16; save it as UTF-8"),
    "UTF-16, other end": (b"\xfe\xff" + (HEAD + ROWS).encode("utf-16-be"), r"encoded in UTF-16"),
    "UTF-16 without a mark": ((HEAD + ROWS).encode("utf-16-le"), r"line 1: it contains a NUL byte"),
    "one class": (HEAD + "1.png,a\n2.png,a\n", r"at least two classes"),
}  # fmt: skip


@pytest.mark.parametrize("case", CSV)
def test_invalid_csv(case, tmp_path):
    text, words = CSV[case]
    with pytest.raises(InputError, match=words):
        open_dataset(write(tmp_path, "t.csv", text))


GOOD = '{"path": "1.png", "label": "a"}\n'


def row(label):
    return f'{{"path": "2.png", "label": {label}}}\n'


TYPES = r"line 3: a label must be a string or an integer, or a list of these .* not "
JSONL = {
    "empty": ("", r"t\.jsonl has no rows"),
    "no object": (GOOD + "[1]\n", r"line 2: the line is not an object"),
    "text": (GOOD + "\n" + '"a"\n', r"line 3: the line is not an object"),
    "cut": (GOOD + GOOD + '{"path": \n', r"line 3: .*column 10: expecting value"),
    "comma": (GOOD + GOOD + '{"path": "2.png" "label": "a"}\n', r"line 3: .*column 18: expecting ',' delimiter"),
    "printed wide": ("[\n  {\n", r"line 1: .*column 2: expecting value"),
    "two on a line": (GOOD + GOOD.strip() + GOOD, r"line 2: .*column 32: extra data"),
    "deep": ("[" * 100_000, r"line 1: its brackets are nested too deeply"),
    "many digits": (GOOD + row("9" * 5000), r"line 2: .*4300 digits"),
    "key twice": (GOOD + '{"path": "2.png", "label": 1, "label": 2}\n', r"line 2: the key 'label' appears twice"),
    "other columns": ('{"where": "1.png"}\n', r"line 1: the column path or image is missing; found: where"),
    "no path": (GOOD + '{"image": "1.png", "label": "a"}\n', r"line 2: the path is missing"),
    "path a number": (GOOD + '{"path": 3, "label": "a"}\n', r"line 2: the path must be a string, not a number"),
    "path NUL": (GOOD + '{"path": "1\\u0000.png", "label": "a"}\n', r"line 2: the path contains a NUL"),
    "path surrogate": (GOOD + '{"path": "\\ud800.png", "label": "a"}\n', r"line 2: the path contains a lone surrogate"),
    "label surrogate": (GOOD + row('"\\udcff"'), r"line 2: the label contains a lone surrogate"),
    "label NUL": (GOOD + row('"\\u0000"'), r"line 2: the label contains a NUL"),
    "label empty": (GOOD + row('["a", ""]'), r"line 2: a label is missing or empty"),
    "label null": (GOOD + row("null"), r"line 2: a label is missing"),
    "label missing": (GOOD + '{"path": "2.png"}\n', r"line 2: a label is missing"),
    "split": (GOOD + '{"path": "2.png", "label": "a", "split": 0}\n', r"line 2: the split is a number; it must be train"),
    "split false": (GOOD + '{"path": "2.png", "label": "a", "split": false}\n', r"line 2: the split is false"),
    "latin-1": (GOOD.encode() + '{"path": "é"}'.encode("latin-1"), r"line 2: the byte 0xe9"),
    "UTF-16": (GOOD.encode("utf-16"), r"encoded in UTF-16"),
    **{
        f"label {label}": (GOOD + "\n" + row(label), TYPES + what)
        for label, what in [
            ("NaN", "NaN or infinity"), ("-Infinity", "NaN or infinity"), ("1.5", "the number 1.5"),
            ("2.0", "the number 2"), ("true", "true"), ('{"a": 1}', "an object"), ('[["a"]]', "a list"),
            ('["a", NaN]', "NaN or infinity"), ('[{"a": 1}]', "an object"), ("[false]", "false"),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", JSONL)
def test_invalid_jsonl(case, tmp_path):
    text, words = JSONL[case]
    with pytest.raises(InputError, match=words):
        open_dataset(write(tmp_path, "t.jsonl", text))


def test_strings_and_integers_are_labels(tmp_path):
    text = "".join(json.dumps(dict(path=f"{i}.png", label=[7, "cat", -1][i % 3])) + "\r\n" for i in range(12))
    assert open_dataset(write(tmp_path, "t.jsonl", text)).classes == ["7", "-1", "cat"]


def table_of(labels):
    return HEAD + "".join(f"{i}.png,{label}\n" for i, label in enumerate(labels))


@pytest.mark.parametrize(
    "labels",
    [
        [f"{i * 0.37:.2f}" for i in range(120)],  # measurements
        [f"{i % 30 / 7:.3f}" for i in range(900)],  # rounded ones
        ["0.1", "0.25", "-3e-2", "1"],  # a few images
    ],
)
def test_measurements_are_refused_as_regression(tmp_path, labels):
    count = len(set(labels))
    with pytest.raises(InputError, match=rf"{count} different numbers .*regression, .*few classes, such as"):
        open_dataset(write(tmp_path, "t.csv", table_of(labels)))


@pytest.mark.parametrize(
    "labels",
    [
        [i % 400 for i in range(1200)],  # class numbers
        [f"{i % 30}.0" for i in range(90)],  # class numbers as pandas writes them
        [f"{1 + i % 3 / 10}" for i in range(9)],  # versions
        [f"{i / 10}" for i in range(10)] + ["unknown"],  # names
    ],
)
def test_numbers_that_are_classes_are_not_refused(tmp_path, labels):
    rows = [label for label in labels for _ in range(2)]
    assert len(open_dataset(write(tmp_path, "t.csv", table_of(rows))).classes) == len(set(labels))


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "t.csv")
    start = time.perf_counter()
    with pytest.raises(InputError, match=r"t\.csv"):
        open_dataset(tmp_path / "t.csv")
    assert time.perf_counter() - start < 1


def test_too_many_classes_are_refused_before_memory_is_allocated(tmp_path, monkeypatch):
    """A row for each of 100,001 classes, of which one has two: (100,001, 100,001) int64 labels take 80 GB."""
    text = HEAD + "".join(f"{i}.png,{i}\n" for i in range(100_000)) + "x.png,a|b\n"
    with pytest.raises(InputError, match="100,002 classes, and the limit is 100,000"):
        open_dataset(write(tmp_path, "t.csv", text))
    monkeypatch.setattr("vitrail.images.formats.tables._MAX_LABELS", 100)
    text = HEAD + "".join(f"{i}.png,{i}|x\n" for i in range(20))
    with pytest.raises(InputError, match="20 rows and 21 classes, too many for a multi-label table"):
        open_dataset(write(tmp_path, "t.csv", text))
