"""How time and memory grow with the number of tensors, bytes and files, for ckptconv and torch.

The figures are printed and drawn as one SVG. README.md explains them.
"""

from __future__ import annotations

import argparse
import html
import shutil
import tempfile
from collections.abc import Callable, Iterator
from math import ceil, floor, log10
from pathlib import Path

from measuring import measure
from programs import MAKE_MANY, PEAK, TENSORS, ckptconv, make, python

TORCH_ONE = """
import os, sys, torch
torch.save(torch.load(sys.argv[1], "cpu", mmap=True), sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
TORCH_EACH = """
import os, sys, torch
for name in sorted(os.listdir(sys.argv[1])):
    torch.save(torch.load(os.path.join(sys.argv[1], name), "cpu", mmap=True), os.path.join(sys.argv[2], name))
os.sync()
"""
#: All tensors map the same file, so the checkpoint can be larger than the memory.
MAKE_LARGE = f"""
import sys, tempfile, torch
torch.serialization.location_tag = lambda storage: "cuda:0"
numel = int(sys.argv[2]) // 4 // {TENSORS}
with tempfile.NamedTemporaryFile() as file:
    torch.randn(numel).numpy().tofile(file.name)
    names = [f"module.layers.{{i}}.weight" for i in range({TENSORS})]
    torch.save({{name: torch.from_file(file.name, size=numel) for name in names}}, sys.argv[1])
"""
_COLOURS = {"inspect": "#1b6ca8", "convert": "#c0392b", "verify": "#2e8b57", "diff": "#8e44ad", "torch": "#7f8c8d"}
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 220, 60, 40

Points = dict[str, list[tuple[float, float, float]]]  # by command: number, seconds of processor time, bytes


def main() -> None:
    """Measure the requested sizes, print the figures and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the SVG")
    parser.add_argument("--tensors", type=int, default=600_000, help="at most so many")
    parser.add_argument("--bytes", type=int, default=1 << 34, help="at most so many")
    parser.add_argument("--files", type=int, default=10_000, help="at most so many")
    parser.add_argument(
        "--runs", type=int, default=3, help="of each command, of which the one with the least processor time counts"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.out.parent) as made:
        folder = Path(made)
        axes = {
            "tensors": measured(folder, MAKE_MANY, 100, args.tensors, 10, args.runs),
            "bytes": measured(folder, MAKE_LARGE, 1 << 20, args.bytes, 16, args.runs),
            "files": of_files(folder, args.files, args.runs),
        }
    for axis, points in axes.items():
        print(f"\n| {axis} | command | processor | memory |\n| --- | --- | --- | --- |")
        for name, found in points.items():
            for n, seconds, nbytes in found:
                print(f"| {n:,.0f} | {name} | {seconds:.2f} s | {nbytes / 1e6:,.0f} MB |")
    args.out.write_text(drawn(axes))


def measured(folder: Path, code: str, least: int, most: int, step: int, runs: int) -> Points:
    """Return the points for single checkpoints that `code` writes, with `least` to `most` tensors or bytes."""
    points: Points = {}
    for n in steps(least, most, step):
        src, dst = make(folder / "src.pt", n, code), folder / "dst.pt"
        commands = {
            "inspect": ckptconv("inspect", src),
            "convert": ckptconv("convert", "-q", "--force", src, dst, "--to", "cpu"),
            "verify": ckptconv("verify", src),
            "diff": ckptconv("diff", src, src),
            "torch": python(TORCH_ONE + PEAK, src, dst),
        }
        add(points, n, commands, runs)
        src.unlink()
        dst.unlink()
    return points


def of_files(folder: Path, most: int, runs: int) -> Points:
    """Return the points for folders of up to `most` files. Each file contains 12 tensors."""
    points: Points = {}
    first = make(folder / "first.pt", 12, MAKE_MANY)
    for n in steps(1, most, 10):
        src, dst = folder / "src", folder / "dst"
        for each in (src, dst):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir()
        for i in range(n):
            shutil.copyfile(first, src / f"{i:05}.pt")
        commands = {
            "inspect": ckptconv("inspect", src),
            "convert": ckptconv("convert", "-q", "--force", src, dst, "--to", "cpu"),
            "verify": ckptconv("verify", src),
            "torch": python(TORCH_EACH + PEAK, src, dst),
        }
        add(points, n, commands, runs)
    return points


def steps(least: int, most: int, step: int) -> Iterator[int]:
    """Yield `least` and its multiples by powers of `step` below `most`. Then yield `most`."""
    while least < most:
        yield least
        least *= step
    yield most


def add(points: Points, n: int, commands: dict[str, list[str]], runs: int) -> None:
    """Run `commands` and add their processor time and peak memory to `points`, at `n`."""
    for name, command in commands.items():
        seconds, cpu, kib = min((measure(command) for _ in range(runs)), key=lambda run: run.cpu)
        points.setdefault(name, []).append((n, cpu, kib * 1024))
        print(f"{n:,} {name}: {cpu:.2f} s of processor time in {seconds:.2f} s, {kib * 1024 / 1e6:,.0f} MB", flush=True)


# Drawing


def drawn(axes: dict[str, Points]) -> str:
    """Return an SVG with two plots for each axis, time and memory. All scales are logarithmic."""
    parts = []
    for column, (axis, points) in enumerate(axes.items()):
        for row, what in enumerate(("seconds of processor time", "bytes of memory")):
            x, y = _LEFT + column * (_WIDTH + _LEFT), _TOP + row * (_HEIGHT + 2 * _TOP)
            lines = {name: [(each[0], each[row + 1]) for each in found] for name, found in points.items()}
            parts.append(f'<g transform="translate({x} {y})">{"".join(picture(axis, what, lines))}</g>')
    width, height = len(axes) * (_WIDTH + _LEFT) + _LEFT, 2 * (_HEIGHT + 2 * _TOP)
    style = "font: 11px sans-serif; fill: #333"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{style}">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def picture(axis: str, what: str, lines: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    """Yield the SVG elements of one plot: the axes, and a line and a legend entry for each command."""
    every = [point for line in lines.values() for point in line]
    scales = [scale([point[i] for point in every], length) for i, length in ((0, _WIDTH), (1, _HEIGHT))]
    (left, right, x), (low, high, y) = scales
    yield f'<text x="0" y="-8">{html.escape(what)}, by {html.escape(axis)}</text>'
    for power in range(left, right + 1):
        at = x(10**power)
        yield f'<path d="M{at:.1f} 0V{_HEIGHT}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{short(power)}</text>'
    for power in range(low, high + 1):
        at = _HEIGHT - y(10**power)
        yield f'<path d="M0 {at:.1f}H{_WIDTH}" stroke="#ddd"/>'
        yield f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{short(power)}</text>'
    for i, (name, line) in enumerate(lines.items()):
        path = " ".join(f"{x(a):.1f},{_HEIGHT - y(b):.1f}" for a, b in line)
        yield f'<polyline points="{path}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2"/>'
        yield f'<text x="8" y="{14 + 13 * i}" style="fill: {_COLOURS[name]}">{name}</text>'


def scale(values: list[float], length: int) -> tuple[int, int, Callable[[float], float]]:
    """Return the powers of ten around `values`, and a function from a value to its position on an axis of `length`."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return low, high, lambda value: (log10(value) - low) / max(high - low, 1) * length


def short(power: int) -> str:
    """Return ten to the `power` with a unit, such as "10k"."""
    unit, size = next(each for each in (("G", 9), ("M", 6), ("k", 3), ("", -99)) if power >= each[1])
    return f"{10.0 ** (power - max(size, 0)):g}{unit}"


if __name__ == "__main__":
    main()
