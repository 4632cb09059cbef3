"""Pages of systems in the site (a hook of mkdocs): kvcal/systems/NAME/README.md is shown as systems/NAME.md.

A page lies in the folder of its system, and goes with it. Links are written as they lead in the repository, and
turned here to where the pages lie in the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = {f"systems/{path.parent.name}.md": path for path in sorted(DOCS.parent.glob("kvcal/systems/*/README.md"))}
LINK = re.compile(r"\]\(([\w./-]+\.md)")


def on_config(config: Any) -> Any:
    """Below the overview, in the order of their folders."""
    (part,) = (section["Understand"] for section in config.nav if "Understand" in section)
    titles = {uri: path.read_text().partition("\n")[0].removeprefix("# ") for uri, path in PAGES.items()}
    place = next(place for place, page in enumerate(part) if "systems.md" in page.values())
    part.insert(place + 1, {"Each system": [{title: uri} for uri, title in titles.items()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # of the site's builder alone

    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return in_site(markdown, Path(page.file.abs_src_path), page.file.src_uri)


def in_site(markdown: str, path: Path, uri: str) -> str:
    """A page's text with the links of the site. ``uri``: its place there; ``path``: in the repository."""
    uris = {path.resolve(): uri for uri, path in PAGES.items()}

    def moved(link: re.Match[str]) -> str:
        target = (path.parent / link[1]).resolve()
        if target not in uris and not target.is_relative_to(DOCS.resolve()):
            return link[0]  # which the builder warns of
        place = uris.get(target) or target.relative_to(DOCS.resolve()).as_posix()
        return f"]({os.path.relpath(place, Path(uri).parent)}"

    return LINK.sub(moved, markdown)
