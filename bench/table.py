"""Write the tables of docs/benchmarks.md from the results: python -m bench.table"""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def gpu(result: dict[str, Any]) -> str:
    env, lines = result["environment"], []
    lines.append(f"## {result['size']} on one {env['machine']['gpu'].removeprefix('NVIDIA ')}\n")
    lines.append(
        "| task | mode | library | images/s | of the product | peak GiB |\n|---|---|---|---:|---:|---:|"
    )
    for _, group in groupby(result["rows"], key=lambda row: (row["task"], row["mode"])):
        rows = list(group)
        best = max(row["images_per_s"] for row in rows)
        for row in rows:
            rate = f"{row['images_per_s']:,.0f}"
            rate = f"**{rate}**" if row["images_per_s"] == best else rate
            cells = [
                row["task"],
                row["mode"],
                row["library"],
                rate,
                f"{row['of_product']:.1%}",
                f"{row['peak_gib']:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    n = f"n = {result['rounds']} rounds of {result['repeats']} steps at batch {result['batch']}"
    lines.append(f"\n{n}; one 8192³ product: {result['product_tflops']:.0f} TFLOP/s. {made_by(env)}")
    return "\n".join(lines)


def cpu(result: dict[str, Any]) -> str:
    lines = ["| task | library | images/s | ours to it | rounds |", "|---|---|---:|---:|---:|"]
    for row in result["rows"]:
        rate, ratio = f"{row['images_per_s']:.1f}", f"{row['ours_to_it']:.3f}"
        lines.append(f"| {row['task']} | {row['library']} | {rate} | {ratio} | {row['rounds']} |")
    env = result["environment"]
    machine = f"{env['machine']['cpu']}, {env['machine']['threads']} threads"
    note = "*Ours to it*: how many times as fast ours is, the median of each round's own ratio"
    lines.append(f"\n{result['size']}. {note}. {machine}; {made_by(env)}")
    return "\n".join(lines)


def inference_cpu(result: dict[str, Any]) -> str:
    lines = [
        f"**{result['size']}**, batch {result['batch']}\n",
        "| forward pass | images/s | to timm | to the fastest peer |",
    ]
    lines.append("|---|---:|---:|---:|")
    for row in result["rows"]:
        ratios = f"{row['to_timm']:.2f} | {row['to_fastest_peer']:.2f}"
        lines.append(f"| {row['row']} | {row['images_per_s']:.1f} | {ratios} |")
    env = result["environment"]
    note = f"n = {result['rounds']} rounds, {result['clock']}"
    lines.append(f"\n{note}; {env['machine']['cpu']}; {made_by(env)}")
    return "\n".join(lines)


def cpu_steps(result: dict[str, Any]) -> str:
    lines = ["| recipe | step | ms | to ours |", "|---|---|---:|---:|"]
    for row in result["rows"]:
        lines.append(f"| `{row['recipe']}` | {row['step']} | {row['ms']:.1f} | {row['to_ours']:.3f} |")
    env = result["environment"]
    note = "*To ours*: how many times as long as ours it takes, the median of each round's own ratio"
    machine = f"One thread of {env['machine']['cores']} cores, {env['machine']['cpu']}"
    lines.append(f"\n{note}; n = {result['rounds']} rounds. {machine}; {made_by(env)}")
    return "\n".join(lines)


def steps(result: dict[str, Any]) -> str:
    peers = [row["images_per_s"] for row in result["rows"] if row["row"].startswith(("timm", "transformers"))]
    columns = ["step", "ms", "images/s", *(["to the fastest peer"] if peers else []), "peak GiB"]
    lines = [f"**{result['what']}**, batch {result['batch']:,}\n", f"| {' | '.join(columns)} |"]
    lines.append("|---|" + "---:|" * (len(columns) - 1))
    for row in result["rows"]:
        cells = [row["row"], f"{row['ms_per_step']:.2f}", f"{row['images_per_s']:,.0f}"]
        cells += [f"{row['images_per_s'] / max(peers):.2f}"] if peers else []
        lines.append(f"| {' | '.join(cells)} | {row['peak_gib']:.1f} |")
    n = f"n = {result['rounds']} rounds of {result['repeats']} steps"
    lines.append(f"\n{n}; {made_by(result['environment'])}")
    return "\n".join(lines)


def train(result: dict[str, Any]) -> str:
    lines = ["| training | images/s | evaluation, images/s | ready after, s |", "|---|---:|---:|---:|"]
    for row in result["rows"]:
        evaluated = f"{row['evaluated_per_s']:,.0f}" if "evaluated_per_s" in row else ""
        lines.append(f"| {row['row']} | {row['images_per_s']:,.0f} | {evaluated} | {row['ready_s']:.0f} |")
    n = f"n = {result['rounds']} rounds of {result['steps']} steps at batch {result['batch']}"
    files = f"{result['images']:,} JPEGs of {result['kilobytes']:.0f} kB"
    lines.append(f"\n{result['size']}, {files}; {n}; {made_by(result['environment'])}")
    return "\n".join(lines)


def made_by(env: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in env["versions"].items() if "not there" not in version
    )
    return f"{versions}; commit {env['commit']}, {env['date']}.\n`{env['command']}`"


def main() -> None:
    kinds = {
        "gpu": ("gpu-*", gpu),
        "cpu": ("cpu", cpu),
        "inference cpu": ("inference-cpu-*", inference_cpu),
        "cpu steps": ("cpu-steps", cpu_steps),
        "steps": ("steps-*", steps),
        "train": ("train*", train),
    }
    tables = {
        name: "\n\n".join(
            write(json.loads(path.read_text())) for path in sorted(RESULTS.glob(f"{pattern}.json"))
        )
        for name, (pattern, write) in kinds.items()
    }
    page = PAGE.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{table}\n{end}", page, flags=re.DOTALL)  # noqa: B023
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
