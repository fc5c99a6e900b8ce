"""Adds the notebooks and the changelog to the site, and turns pages that GitHub renders into those of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# another package's code, followed by ours
BLOCK = r'^```python title="{}"\n(?:(?!```).*\n)*```$'
SIDES = re.compile(BLOCK.format("(?!logchain).*") + r"\n\n" + BLOCK.format("logchain"), re.MULTILINE)
# a public name, which the site makes a link to the reference
NAME = re.compile(r"`(logchain\.[\w.]*\w)`(?!\])")
# a tag, script or style, which is left alone, or a number that would be broken after its minus
NUMBER = re.compile(r"(?s)(<(?:script|style)\b.*?</(?:script|style)>|<[^>]*>)|(?<![\w.-])(?:-inf|[\d.]+e-\d+)(?!\w)")


@event_priority(100)  # before the plugin that looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that are outside of `pages`."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{path.name}"
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    files.append(File.generated(config, "changelog.md", abs_src_path=str(ROOT / "logchain" / "CHANGELOG.md")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to what the site has elsewhere; code side by side, sessions marked: prompts and outputs are not copied."""
    markdown = markdown.replace("../../notebooks/", "notebooks/").replace("../../logchain/CHANGELOG.md", "changelog.md")
    markdown = NAME.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', markdown)
    markdown = SIDES.sub(r'<div class="sides" markdown>\n\n\g<0>\n\n</div>', markdown)
    markdown = re.sub(r"```python( title=.*)?\n>>>", r"```pycon\1\n>>>", markdown)
    return re.sub(r" +# doctest: .*", "", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Numbers in one piece."""
    return NUMBER.sub(lambda found: found[1] or f'<span class="number">{found[0]}</span>', html)
