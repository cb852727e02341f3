"""ONNX and `torch.export` files of a changed model, written beside its weights or elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from normswap.checkpoint import DestinationError
from normswap.errors import CaptureError, NormswapError
from normswap.inputs import resolve_inputs
from normswap.tensorstore import first_line

SUFFIXES = (".onnx", ".pt2")


def check_targets(targets: Iterable[Path], *, overwrite: bool = False) -> None:
    """Raise unless each can be exported to.

    Raises:
        NormswapError: the suffix is not one of :data:`SUFFIXES`.
        DestinationError: a file outside of the model's directory exists already, or the
            directory it should lie in does not.
    """
    for target in targets:
        if target.suffix not in SUFFIXES:
            raise NormswapError(f"cannot export to {target}: write {' or '.join(SUFFIXES)}")
        if _is_outside(target) and target.exists() and not overwrite:
            raise DestinationError(f"{target}: exists already; choose another name")
        if _is_outside(target) and not target.parent.is_dir():
            raise DestinationError(f"{target}: there is no directory {target.parent}")


@contextmanager
def outside_files(targets: Iterable[Path]) -> Generator[dict[Path, Path]]:
    """Where to write each target that is a path; they are renamed when the block succeeds."""
    staged = {
        target: target.with_name(f".{secrets.token_hex(4)}.partial{target.suffix}")
        for target in targets
        if _is_outside(target)
    }
    try:
        yield staged
        for target, stage in staged.items():
            stage.replace(target)
    except OSError as error:
        raise DestinationError(f"the exported file cannot be written: {error}") from error
    finally:
        for stage in staged.values():
            stage.unlink(missing_ok=True)


def export_model(model: nn.Module, example_inputs: Any, path: Path) -> None:
    """Export the model, as called with the example inputs (their shapes are fixed in the file).

    Args:
        model: in eval mode.
        example_inputs: as everywhere; None builds them from what the model says of itself.
        path: ends in ``.onnx`` or ``.pt2``.

    Raises:
        CaptureError: the exporter cannot.
        NormswapError: it is not installed.
    """
    import torch

    inputs = resolve_inputs(model, example_inputs)
    try:
        # The exporters print what they do, and standard output is for data.
        with contextlib.redirect_stdout(io.StringIO()):
            if path.suffix == ".onnx":
                torch.onnx.export(
                    model,
                    inputs.args,
                    os.fspath(path),
                    kwargs=inputs.kwargs,
                    dynamo=True,
                    external_data=False,
                    verbose=False,
                )
            else:
                program = torch.export.export(model, inputs.args, inputs.kwargs, strict=False)
                torch.export.save(program, path)
    except ImportError as error:
        raise NormswapError(f"{error}; pip install 'normswap[onnx]'") from error
    except OSError:
        raise
    except Exception as error:
        raise CaptureError(f"exporting {path.suffix} failed: {first_line(error)}") from error


def _is_outside(target: Path) -> bool:
    """A bare name goes into the model's directory; anything else is a path."""
    return target.name != str(target)
