"""The site is whole: it builds with every link and anchor, asks nothing of anyone, and has what it refers to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from markdown.extensions.toc import slugify
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from site_pages import DOCS, FRONT, PAGES, ROOT, name

import hf_offload_cache
import hf_offload_cache.testing


def built(folder: Path, **changed: Any) -> Path:
    """The site in `folder`. Raises `Abort` for a warning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # snippets are looked for from there
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), **changed)
        assert config.strict
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)
        finally:
            config.plugins.on_shutdown()
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "site")


class Page(HTMLParser):
    """What a page loads by itself, where it leads to, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.anchors.update(given[key] for key in ("id", "name") if key in given)
        if "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") not in ("next", "prev", "canonical"):
            self.loaded.append(given["href"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded.extend(re.findall(r"url\(([^)]+)\)", given.get("style", "")))


def outside(url: str) -> bool:
    return bool(re.match(r"""["']?(\w+:)?//""", url.strip()))


def leads_nowhere(url: str) -> bool:
    """An address of another host that cannot be one."""
    parts = urlsplit(url)
    return parts.scheme not in ("http", "https") or not re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc)


def html(site: Path) -> Iterator[tuple[Path, Page]]:
    for file in sorted(site.rglob("*.html")):
        yield file, Page(file)


def test_each_page_is_built(site: Path) -> None:
    expected = {path.relative_to(DOCS).with_suffix(".html") for path in PAGES}
    expected = {path.with_name("index.html") if path.stem == "README" else path for path in expected}
    assert expected == {path.relative_to(site) for path in site.rglob("*.html")} - {Path("404.html")}
    assert len(expected) > 20


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[there](nowhere.md)", "nowhere.md"),
        ("[there](other.md#nowhere)", "anchor"),
        ("[there](#nowhere)", "anchor"),
        ("![seen](nowhere.svg)", "nowhere.svg"),
        ("[there](/absolute.md)", "absolute"),
    ],
)
def test_a_broken_link_is_an_error(
    line: str, complaint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(f"# One\n\n[right](other.md#two)\n\n{line}\n")
    (pages / "other.md").write_text("# Two\n")
    (pages / "pictures").mkdir()
    (pages / "pictures" / "icon.svg").write_bytes((DOCS / "pictures" / "icon.svg").read_bytes())
    with pytest.raises(Abort):
        built(tmp_path / "site", docs_dir=str(pages), nav=None, plugins=[])
    assert complaint in caplog.text


def test_nothing_is_asked_of_another_host(site: Path) -> None:
    """When a page is opened: no font, icon, script or style comes from elsewhere."""
    found = [f"{file.name}: {url}" for file, page in html(site) for url in page.loaded if outside(url)]
    for style in site.rglob("*.css"):
        found += [f"{style.name}: {url}" for url in re.findall(r"url\(([^)]+)\)|@import ([^;]+)", style.read_text())
                  for url in url if url and outside(url)]  # fmt: skip
    for picture in site.rglob("*.svg"):
        inside = picture.read_text()  # a part of its own begins with "#"
        found += [f"{picture.name}: {url}" for url in re.findall(r'href="([^#"][^"]*)"', inside)]
    assert not found
    assert not [file.name for file, page in html(site) if "mermaid" in file.read_text().split("<main")[1]]  # by a CDN


def test_what_is_loaded_is_there(site: Path) -> None:
    missing = [
        f"{file.name}: {url}"
        for file, page in html(site)
        for url in page.loaded
        if file.name != "404.html" and not url.startswith("data:") and not (file.parent / urlsplit(url).path).is_file()
    ]
    assert not missing


def test_the_site_is_searched_from_the_disk(site: Path) -> None:
    """Browsers refuse a page that is opened from a disk both `fetch` and workers."""
    index = (site / "search" / "search_index.js").read_text()
    assert index == "var __index = " + (site / "search" / "search_index.json").read_text()
    found = json.loads(index.removeprefix("var __index = "))["docs"]
    assert {one["location"].partition("#")[0] for one in found} >= {"index.html", "quickstart.html", "api.html"}
    for file, page in html(site):
        if file.name != "404.html":
            (script,) = [url for url in page.loaded if "iframe-worker" in url]
            assert "window.Worker" in (file.parent / script).read_text()


def test_links_to_elsewhere_have_the_form_of_one(site: Path) -> None:
    links = [url for _, page in html(site) for url in page.links if outside(url)]
    assert links and not [url for url in links if leads_nowhere(url)]


def test_the_reference_has_all_that_is_exported(site: Path) -> None:
    anchors = Page(site / "api.html").anchors
    names = [f"hf_offload_cache.{one}" for one in hf_offload_cache.__all__]
    names += [f"hf_offload_cache.testing.{one}" for one in hf_offload_cache.testing.__all__]
    assert len(names) > 30 and [one for one in names if one not in anchors] == []


@pytest.mark.parametrize("file", FRONT, ids=name)
def test_links_of_the_front_lead_somewhere(file: Path) -> None:
    page = re.sub(r"<!--.*?-->", "", file.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    broken = []
    for link in links:
        if outside(link):
            broken += [link] * leads_nowhere(link)
            continue
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if target.is_file() and anchor else []
        if not target.exists() or (anchor and anchor not in [slugify(one.replace("`", ""), "-") for one in headings]):
            broken.append(link)
    assert links and not broken


def test_the_front_leads_to_every_page() -> None:
    """But to the overview of the caches, which are there themselves, and to the changelog's copy."""
    linked = set(re.findall(r"\]\(([^)\s#]+)", FRONT[0].read_text()))
    assert {name(path) for path in PAGES} - linked == {"docs/caches/index.md", "docs/changelog.md"}
    assert len(FRONT[0].read_text().splitlines()) <= 110
