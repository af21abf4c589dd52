"""The chat page's reader of Markdown, in Node: what it makes of a text, and that no line takes it long."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "services/gateway/web/chat"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node here")

MEGABYTE = 1_000_000
SECONDS_FOR_A_MEGABYTE = 5.0  # what reads a line once takes some hundredths, what reads it once a character takes hours
READ = """
import { parseBlocks } from "./markdown.js";
const text = await new Response(process.stdin).text();
const blocks = parseBlocks(text.split("\\n"));
console.log(JSON.stringify(blocks.map(({ source, ...block }) => block)));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules where Node takes them for modules."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("markdown.js", "dom.js"):
        shutil.copy(PAGE / name, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "read.js").write_text(READ)
    return folder


def read(page: Path, text: str) -> list[dict[str, Any]]:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "read.js"],
        cwd=page,
        input=text,
        capture_output=True,
        text=True,
        timeout=SECONDS_FOR_A_MEGABYTE,
        check=True,
    )
    blocks: list[dict[str, Any]] = json.loads(done.stdout)
    return blocks


@pytest.mark.parametrize(
    "line",
    [
        "# " + " " * MEGABYTE + "x",
        "# " + "x #" * (MEGABYTE // 3) + "x",
        "# " + "#" * MEGABYTE + "x",
        "```" + " " * MEGABYTE + "`",
        "~" * MEGABYTE + "`",
        "- " * (MEGABYTE // 2) + "x",
        "-" + " " * MEGABYTE + "x",
        "a|b\n-" + " " * MEGABYTE + "x",
        "a|b\n" + "|-" * (MEGABYTE // 2) + "x",
        "- a" + "\n" * MEGABYTE + "b",
        "- a\n" + "\n\n- b" * (MEGABYTE // 5),
        "> " * (MEGABYTE // 2) + "x",
    ],
    ids=lambda line: f"{line[:8]}…{line[-4:]}".replace("\n", "↵"),
)
def test_a_megabyte_of_marks_is_read_at_once(page: Path, line: str):
    assert read(page, line)


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        ("# Title", (1, "Title")),
        ("### Title ##  ", (3, "Title")),
        ("## About C#", (2, "About C#")),
        ("#", (1, "")),
        ("# #", (1, "")),
        ("#hashtag", None),
        ("####### seven", None),
    ],
)
def test_a_heading_has_its_level_and_its_text_without_closing_marks(
    page: Path, line: str, heading: tuple[int, str] | None
):
    [block] = read(page, line)
    assert (block["level"], block["text"]) == heading if heading else block["kind"] == "paragraph"


def test_a_line_of_dashes_and_colons_makes_a_table_of_the_line_above(page: Path):
    [table] = read(page, "| a | b |\n|:--|---:|\n| 1 | 2 |")
    assert (table["kind"], table["head"], table["alignment"], table["rows"]) == (
        "table",
        ["a", "b"],
        ["left", "right"],
        [["1", "2"]],
    )
    assert read(page, "a | b\n--- | x")[0]["kind"] == "paragraph"


def test_blank_lines_stay_with_the_item_that_goes_on_and_end_the_list_before_other_text(page: Path):
    first, after = read(page, "- a\n\n  more of a\n\n- b\nlazily\n\ntext")
    assert first["items"] == [["a", "", "more of a", ""], ["b", "lazily"]]
    assert after["text"] == "text"


def test_a_fence_names_its_language_and_keeps_what_is_inside(page: Path):
    [code] = read(page, "```  python  \n# no heading\n```")
    assert (code["language"], code["text"]) == ("python", "# no heading")
