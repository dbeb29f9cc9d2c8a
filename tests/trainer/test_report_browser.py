"""The page in headless Chromium: no error, either theme, a narrow screen, values under the pointer, hidden runs."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import pretraining, rollouts, write_run

from lowbit.trainer.report import write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path (apt-get install chromium)")

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


def chromium(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    profile = page.parent / "profile"
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={profile}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    runs = [write_run(folder / "first", pretraining()), write_run(folder / ("long-" * 30), rollouts(), "rl")]
    return write_page(runs, folder / "page")


def test_both_themes_without_a_complaint(page: Path) -> None:
    """Screenshots: the page's corner is light or dark as the reader asks, and curves are drawn in several colours."""
    from matplotlib.image import imread

    for scheme, low, high in ((1, 0.95, 1.0), (0, 0.0, 0.15)):
        picture = page.with_name(f"{scheme}.png")
        done = chromium(
            page,
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={picture}",
            "--window-size=1300,1500",
        )
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not complaints, complaints
        pixels = imread(str(picture))[..., :3]
        assert low <= pixels[2, 2].mean() <= high and low <= pixels[-2, -2].mean() <= high
        colourful = (pixels.max(axis=2) - pixels.min(axis=2)) > 0.3
        assert 1000 < colourful.sum() < 0.2 * colourful.size


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
