"""How well `vitrail doctor DATA --model MODEL` finds planted problems.

    OMP_NUM_THREADS=1 python -m bench.curation

A subset of Flowers-102 (64 pixels) gets 5 % wrong labels, copies of images that were re-encoded, cropped or
brightened (half of them in the other split), and photographs of ants and bees. Features are those of DeiT-Ti.
Precision and recall are of what was planted; the data has problems of its own, which count as false here.
A seed chooses what is planted where. The thresholds were chosen on other classes (--first 0 --seeds 0).
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from bench.measure import environment, save
from vitrail.evaluation.curation import Curation, curate, embed_dataset
from vitrail.images.formats.sources import open_labeled
from vitrail.weights.load import load

RESULTS = Path(__file__).parent / "results" / "curation.json"
CLASSES, PER_CLASS, COPIES, STRANGERS, FLIPPED = 20, 36, 20, 15, 0.05
CHANGES = ("re-encoded", "cropped", "brightened")


def change(image: Image.Image, how: str) -> bytes:
    """A copy of an image as a JPEG file."""
    side = image.width
    if how == "cropped":
        cut = side // 12
        image = image.crop((cut, cut, side - cut, side - cut)).resize((side, side), Image.Resampling.BICUBIC)
    elif how == "brightened":
        image = ImageEnhance.Brightness(image).enhance(1.35)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40 if how == "re-encoded" else 85)
    return file.getvalue()


def plant(folder: Path, data: Path, first: int, seed: int) -> dict[str, Any]:
    """Write the data set; returns what was planted, by file name."""
    rng = np.random.default_rng(seed)
    with zipfile.ZipFile(data / "flowers102_64.zip") as archive:
        train = sorted(name for name in archive.namelist() if "/train/" in name and name.endswith(".jpg"))
        by_class: dict[str, list[str]] = {}
        for name in train:
            by_class.setdefault(name.split("/")[-2], []).append(name)
        names = sorted((one for one in by_class if len(by_class[one]) >= PER_CLASS), key=int)[first:][
            :CLASSES
        ]
        images = {name: archive.read(name) for one in names for name in by_class[one][:PER_CLASS]}
    files = {f"train/{n.split('/')[-2]}/{Path(n).name}": content for n, content in images.items()}
    order = [str(name) for name in rng.permutation(sorted(files))]
    copied, flipped = order[: 3 * COPIES], order[3 * COPIES :][: int(FLIPPED * len(files))]
    moved = {}
    for name in flipped:
        _, own, file = name.split("/")
        wrong = str(rng.choice([one for one in names if one != own]))
        files[f"train/{wrong}/{file}"] = files.pop(name)
        moved[f"train/{wrong}/{file}"] = own
    pairs = {}
    for number, name in enumerate(copied):
        how, (split, own, file) = CHANGES[number % 3], name.split("/")
        target = f"{'val' if number % 2 else split}/{own}/{how}-{file}"
        files[target] = change(Image.open(io.BytesIO(files[name])).convert("RGB"), how)
        pairs[target] = (name, how)
    strangers = []
    with tarfile.open(data / "hymenoptera_s160.tar") as archive:
        members = sorted(one.name for one in archive.getmembers() if one.name.endswith(".jpg"))
        for number, member in enumerate(rng.choice(members, STRANGERS, replace=False)):
            photo = archive.extractfile(str(member))
            assert photo is not None
            image = (
                Image.open(io.BytesIO(photo.read())).convert("RGB").resize((64, 64), Image.Resampling.BICUBIC)
            )
            target = f"train/{names[number % len(names)]}/stranger{number}.jpg"
            files[target] = change(image, "re-encoded")
            strangers.append(target)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {"labels": moved, "copies": pairs, "strangers": strangers, "images": len(files)}


def count(found: set[Any], planted: set[Any]) -> dict[str, int]:
    """How many were planted, reported, and both."""
    return {"planted": len(planted), "reported": len(found), "correct": len(found & planted)}


def evaluate(result: Curation, names: list[str], planted: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The counts of each kind of finding; a report does not say how a copy was changed."""
    short = ["/".join(Path(name).parts[-3:]) for name in names]
    reported = {
        across: {
            frozenset((short[one.first], short[one.second]))
            for one in result.duplicates
            if one.across == across
        }
        for across in (False, True)
    }
    rows: dict[str, dict[str, int]] = {}
    for across, where in ((False, "copies in one split"), (True, "copies in two splits")):
        kinds = {
            how: {
                frozenset((copy, original))
                for copy, (original, kind) in planted["copies"].items()
                if kind == how and copy.startswith("val/") == across
            }
            for how in CHANGES
        }
        rows[where] = count(reported[across], set().union(*kinds.values()))
        for how, pairs in kinds.items():
            rows[f"{where}, {how}"] = {"planted": len(pairs), "correct": len(reported[across] & pairs)}
    strangers = set(planted["strangers"])
    labels = {short[one.index] for one in result.mislabeled}
    rows["wrong labels"] = count(labels - strangers, set(planted["labels"]))
    rows["strangers"] = count({short[one.index] for one in result.outliers}, strangers)
    return rows


def table(rows: list[dict[str, dict[str, int]]]) -> str:
    """Markdown: precision and recall over all seeds, with the lowest and the highest of a seed."""
    lines = [f"| planted | n, {len(rows)} seeds | precision | recall |", "|---|---:|---|---|"]
    for name in rows[0]:
        counts = [row[name] for row in rows]
        cells = [_percent(counts, whole) if whole in counts[0] else "" for whole in ("reported", "planted")]
        lines.append(f"| {name} | {sum(one['planted'] for one in counts)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(counts: list[dict[str, int]], whole: str) -> str:
    correct, total = (sum(one[name] for one in counts) for name in ("correct", whole))
    each = [100 * one["correct"] / max(1, one[whole]) for one in counts]
    return f"{100 * correct / max(1, total):.0f} % ({min(each):.0f}-{max(each):.0f}), {correct}/{total}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=20, help="the first class, by its number in the data")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about, start = environment(), time.perf_counter()
    bundle = load(args.folder / "weights" / "deit_tiny_imagenet1k.safetensors", preprocess="deit")
    runs = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            planted = plant(Path(name), args.folder, args.first, seed)
            images = embed_dataset(
                bundle,
                open_labeled(Path(name)),
                workers=0,
                progress=lambda done: print(done, end="\r", file=sys.stderr),
            )
            rows = evaluate(curate(images), images.names, planted)
        runs.append({"seed": seed, "images": planted["images"], "classes": CLASSES, "results": rows})
        print(runs[-1], flush=True)
    seconds = round(time.perf_counter() - start)
    save({"runs": runs, "seconds": seconds, "environment": about}, args.out)
    print(table([run["results"] for run in runs]))


if __name__ == "__main__":
    main()
