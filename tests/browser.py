"""Headless Chromium, for tests of pages; those are skipped where there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needed = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path (apt-get install chromium)")


def chromium(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Open a page; its profile lies beside it."""
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


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page wrote to the console: errors of its script, and what its policy refused."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def require_picture(picture: Path, dark: bool) -> None:
    """A screenshot's corners are light or dark as the reader asked, and curves are drawn in several colours."""
    from matplotlib.image import imread

    low, high = (0.0, 0.15) if dark else (0.95, 1.0)
    pixels = imread(str(picture))[..., :3]
    assert low <= pixels[2, 2].mean() <= high and low <= pixels[-2, -2].mean() <= high
    colourful = (pixels.max(axis=2) - pixels.min(axis=2)) > 0.3
    assert 1000 < colourful.sum() < 0.2 * colourful.size


def require_both_themes(page: Path) -> None:
    """Screenshots of a page in both themes, without a complaint."""
    for scheme in (0, 1):
        picture = page.with_name(f"{scheme}.png")
        shown = chromium(
            page,
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={picture}",
            "--window-size=1300,1500",
        )
        assert not complaints(shown), shown.stderr
        require_picture(picture, dark=scheme == 0)
