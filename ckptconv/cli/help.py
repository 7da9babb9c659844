"""The command ``ckptconv help``, which finds the page of the documentation for an error message or a topic.

The pages are those of ``docs/fix`` and ``docs/how-to``. The wheel has a copy of them in ``pages`` next to this module.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from math import log
from pathlib import Path
from typing import Any

import click

from ckptconv.cli.commands import Command, debug_option
from ckptconv.cli.terminal import style_of
from ckptconv.errors import NoMatchError
from ckptconv.hints import Placeholder, command
from ckptconv.light_dataclass import dataclass

_OTHERS = 3  # further pages that are listed
_LONGEST = 1_000_000  # characters of the text; the message of a traceback comes last
_WIDEST = 100  # columns
_FENCE = re.compile(r"^```\w*\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class _Page:
    """A page of the documentation.

    Attributes:
        title: The title: an error message or a task.
        body: The text below the title, in Markdown.
        parts: The words of each part of the title. In an error message, other words can be between the parts.
        words: The words of the title, the text and the file name.
    """

    title: str
    body: str
    parts: list[set[str]]
    words: set[str]


@click.command(
    "help",
    cls=Command,
    exits="0 a page was found, 1 none was found, 2 wrong usage",
    epilog='Example: ckptconv help "Attempting to deserialize object on CUDA device 1"',
    context_settings={"ignore_unknown_options": True},
)
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@debug_option
@click.pass_context
def help_command(context: click.Context, /, words: tuple[str, ...], **_: Any) -> None:
    """Find the command for an error message or a task.

    TEXT is an error message, a traceback, or a topic such as "half precision". If it is -, it is read from standard
    input. If it is the name of a command, the options of the command are shown.
    """
    above = context.find_root()
    of_command = isinstance(above.command, click.Group) and above.command.get_command(above, " ".join(words))
    if of_command or not words:
        click.echo((click.Context(of_command, above, words[0]) if of_command else above).get_help())
        return
    wanted = sys.stdin.read() if words == ("-",) else " ".join(words)
    pages = _found(wanted[-_LONGEST:])
    if not pages:
        hint = "to find out what is wrong with a file: " + command("inspect", Placeholder("FILE"))
        raise NoMatchError(f"no page matches {wanted.strip()[-80:]!r}", hint=hint)
    click.echo("\n".join(_lines(*pages)))


def _found(text: str) -> list[_Page]:
    """Return the page that matches `text` best, and up to three others that match nearly as well.

    Empty without a match.
    """
    pages = [*_pages()]
    in_titles = Counter(word for page in pages for word in set().union(*page.parts))
    in_pages = Counter(word for page in pages for word in page.words)

    def weight(words: Iterable[str]) -> float:  # rare words say more; a word of titles is compared with titles
        return sum(log(len(pages) / (in_titles[word] or in_pages[word])) for word in words if word in in_pages)

    lines = [_words(line) for line in text.splitlines()]
    typed = set().union(*lines)
    total = weight(typed) or 1

    def fits(page: _Page) -> float:
        """Return how well `page` fits: its title if most of that is in `text`, or if `text` is in the title."""
        title = sum(max(weight(part & line) for line in lines) for part in page.parts)
        body = weight(page.words & typed)
        least = max(min(sum(map(weight, page.parts)), total), title) or 1
        return title * (title / least) ** 5 + 0.1 * body * (body / total) ** 2

    ranked = sorted(((fits(page), -i, page) for i, page in enumerate(pages)), reverse=True) if lines else []
    return [page for value, _, page in ranked[: 1 + _OTHERS] if value > 0.05 and value >= ranked[0][0] / 4]


def _words(text: str) -> set[str]:
    """Return the words of `text`.

    A word followed by a dot also counts with its dot, because ``module.`` is a prefix.
    """
    text = text.lower()
    return {*re.findall(r"\w+", text), *re.findall(r"\w+\.(?=\S|$)", text)}


def _pages() -> Iterator[_Page]:
    """Yield all pages in the order of the tables of contents."""
    here = Path(__file__)
    folder = next(each for each in (here.with_name("pages"), here.parents[2] / "docs") if each.is_dir())
    for kind in ("fix", "how-to"):
        for name in re.findall(r"\]\(([\w-]+)\.md\)", (folder / kind / "index.md").read_text("utf-8")):
            title, _, body = (folder / kind / f"{name}.md").read_text("utf-8").removeprefix("# ").partition("\n")
            title = re.sub(r"\\(.)", r"\1", title)
            yield _Page(title, body, [*map(_words, re.split(r"\.\.\.|, ", title))], _words(f"{title} {body} {name}"))


def _lines(page: _Page, *others: _Page) -> Iterator[str]:
    """Yield the title and the first section of `page`. For `others`, yield the title and the first command."""
    style = style_of(sys.stdout)
    width = min(style.width or _WIDEST, _WIDEST)
    section, *more = page.body.split("\n## ")
    section = re.sub(r"\[([^][]*)\]\([^()]*\)", r"\1", section)  # links
    section = re.sub(r"^[ |-]+\n", "", section, flags=re.MULTILINE)  # lines of tables
    yield style.paint(style.text(page.title), "title")
    for n, block in enumerate(_FENCE.split(section)):
        if n % 2:
            yield from ("    " + line for line in block.splitlines())
            continue
        for paragraph in filter(str.strip, block.split("\n\n")):
            yield ""
            for line in re.split(r"\n(?=[|-] )", paragraph.strip()):  # a row of a table, an item, or all of it
                hanging = "  " if line[0] in "|-" else ""
                yield click.wrap_text(" ".join(line.split()), width, subsequent_indent=hanging)
        yield ""
    if more:
        yield "The page in the documentation goes on: " + "; ".join(each.partition("\n")[0] for each in more)
    for other in others:
        yield style.paint(style.text(f"See also: {other.title}"), "title")
        yield from ("    " + line for line in re.findall(r"^ckptconv .*", other.body, re.MULTILINE)[:1])
