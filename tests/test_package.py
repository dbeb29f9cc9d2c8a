"""What is installed from a wheel is all of the package: every module, preset and marker file, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SKIPPED = {"__pycache__"}


def test_a_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building without a network needs setuptools>=77")
    source = tmp_path / "source"  # a build leaves folders in its source tree
    shutil.copytree(ROOT / "lowbit", source / "lowbit", ignore=shutil.ignore_patterns(*SKIPPED))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(source)], check=True
    )
    [wheel] = tmp_path.glob("lowbit-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {str(f.relative_to(source)) for f in (source / "lowbit").rglob("*") if f.is_file()}
    assert any(name.endswith("preset/cpu.yaml") for name in expected) and "lowbit/py.typed" in expected
    assert packed == expected


def test_presets_are_found_as_package_data() -> None:
    from lowbit.configs.overrides import groups

    folder = ROOT / "lowbit" / "configs"
    assert groups(None) == {
        f.name: sorted(y.stem for y in f.glob("*.yaml")) for f in sorted(folder.iterdir()) if list(f.glob("*.yaml"))
    }
