# SPDX-License-Identifier: Apache-2.0
"""The documentation: links lead somewhere, and its tables are those of the code."""

import re
import subprocess
from pathlib import Path

import pytest

from core import columns
from core.algorithm import replay

ROOT = Path(__file__).parents[2]
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
).stdout.split()


@pytest.mark.parametrize("page", LISTED)
def test_links_lead_to_files_and_headings_that_exist(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def headings(page: Path) -> set[str]:
    """Return the anchors of a Markdown page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


def test_the_glossary_of_columns_is_that_of_the_code():
    page = (ROOT / "docs" / "logs-and-columns.md").read_text()
    glossary = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", page, flags=re.M)
    fields = (*columns.FIELDS, replay.LAG, replay.RHO)  # The last ones not always.
    assert glossary == [(f.name, f.unit, f.meaning) for f in fields]


def test_the_readme_is_one_sitting():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_diffs_in_the_readme_are_lines_of_the_examples():
    patches = {
        line
        for name in ("minatar", "exploration")
        for path in (ROOT / "examples" / name).glob("*.patch")
        for line in path.read_text().splitlines()
    }
    diffs = re.findall(
        r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S
    )
    assert len(diffs) == 3
    for line in "".join(diffs).splitlines():
        if line and not line.startswith("--- "):
            assert line in patches, line


@pytest.mark.parametrize("name", ["appo", "exploration", "impact"])
def test_an_example_counts_the_lines_of_its_patch(name):
    folder = ROOT / "examples" / name
    patch = (folder / "monobeast.patch").read_text()
    count = len(re.findall(r"^\+(?!\+\+)", patch, flags=re.M))
    assert f"{count} lines of" in (folder / "README.md").read_text()
    if name == "exploration":
        assert f"{count} lines of" in (ROOT / "README.md").read_text()
