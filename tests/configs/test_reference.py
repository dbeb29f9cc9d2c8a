"""docs/configuration.md is current and complete; the sizes that presets state are right."""

import re
from pathlib import Path

import pytest
from config_reference import TARGET, render

from lowbit.configs import schema
from lowbit.configs.compose import compose
from lowbit.configs.overrides import groups
from lowbit.configs.strict import schema_paths

FOLDER = Path(schema.__file__).parent


def test_the_page_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run python scripts/config_reference.py"


def test_every_key_and_preset_is_on_the_page() -> None:
    page = render()
    sections = {p.rsplit(".", 1)[0] for p in schema_paths() if "." in p}
    leaves = [p for p in schema_paths() if p not in sections and p != "data.sources"]
    assert len(leaves) > 80
    for key in leaves:
        assert f"`{key}`" in page or f"`{key}.N" in page, key
    for group, choices in groups().items():
        for choice in choices:
            row = re.search(rf"^\| `{group}` \| `{choice}` \| (.*) \|$", page, re.M)
            assert row and row[1], (group, choice)


@pytest.mark.parametrize(
    ("name", "blocks", "vocabulary", "total"),
    [
        ("30m", 18e6, 16_384, 30e6),
        ("70m", 21e6, 50_304, 70e6),
        ("150m", 71e6, 50_304, 150e6),
        ("370m", 268e6, 50_304, 370e6),
        ("1b", 1.0e9, 128_256, 1.24e9),
        ("8b", 7.0e9, 128_256, 8.0e9),
    ],
)
def test_sizes_in_words(name: str, blocks: float, vocabulary: int, total: float) -> None:
    m = compose([f"model={name}"]).model
    head = m.width // m.heads
    count = m.layers * (m.width * head * (2 * m.heads + 2 * m.kv_heads) + 3 * m.width * m.mlp_width)
    assert count == pytest.approx(blocks, rel=0.04)
    assert count + (1 if m.tied_head else 2) * vocabulary * m.width == pytest.approx(total, rel=0.05)
    words = (FOLDER / "model" / f"{name}.yaml").read_text()
    million = re.search(r"About (\d+) (million|billion)", words)
    assert million and int(million[1]) * (1e6 if million[2] == "million" else 1e9) == pytest.approx(blocks, rel=0.03)
