"""Every example runs, and so does the Python of the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert blocks
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)


def test_readme_explains_every_reason() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "normswap").rglob("*.py"))
    codes = set(re.findall(r"Blocked\(\s*\"([a-z-]+)\"", source))
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme[readme.index("| reason |") :].split("\n\n")[0]
    explained = set(re.findall(r"`([a-z-]+)`", table))
    assert codes - explained == set()
