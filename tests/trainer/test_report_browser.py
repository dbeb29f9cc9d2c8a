"""The page in headless Chromium: no error, either theme, a narrow screen, values under the pointer, hidden runs."""

import html
import re
from pathlib import Path

import browser
import pytest
from browser import chromium
from report_runs import pretraining, rollouts, write_run

from lowbit.trainer.report import write_page

pytestmark = browser.needed

PROBE = """
const found = {}, root = document.documentElement;
found.wide = root.scrollWidth - root.clientWidth;
const svg = document.querySelector("figure svg[role]"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 20}));
const tip = document.getElementById("tip");
found.tip = getComputedStyle(tip).visibility + ": " + tip.innerText;
const shown = (path) => getComputedStyle(path).display !== "none";
const count = () => [...document.querySelectorAll(".plot path.r0")].filter(shown).length;
found.before = count();
document.querySelector(".runs button").click();
found.after = count();
document.body.dataset.found = JSON.stringify(found);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    runs = [write_run(folder / "first", pretraining()), write_run(folder / ("long-" * 30), rollouts(), "rl")]
    return write_page(runs, folder / "page")


def test_both_themes_without_a_complaint(page: Path) -> None:
    browser.require_both_themes(page)


def test_a_narrow_screen_the_pointer_and_the_legend(page: Path) -> None:
    """In a frame of 360 units, with a probe put into the page (whose own policy would not let it run)."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    text = text.replace("</body>", f"<script>{PROBE}</script></body>")
    frame = f'<iframe style="width:360px;height:800px;border:0" srcdoc="{html.escape(text)}"></iframe>'
    script = "onload = () => document.body.append(document.querySelector('iframe').contentDocument.body.dataset.found)"
    outer = page.with_name("outer.html")
    outer.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><body>{frame}<script>{script}</script></body>", encoding="utf-8"
    )
    dom = chromium(outer, "--dump-dom", "--window-size=800,900").stdout
    found = re.search(r'\{"wide":(-?\d+),"tip":"(.*?)","before":(\d+),"after":(\d+)\}', html.unescape(dom))
    assert found, dom[-500:]
    assert int(found[1]) <= 0, "nothing is wider than the screen"
    assert found[2].startswith("visible: tokens ") and "first" in found[2]
    assert int(found[3]) > 10 and int(found[4]) == 0, "a click on its name hides a run's curves"
