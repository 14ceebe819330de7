"""Figures as files."""

import io
import threading
from contextlib import suppress
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fedspd.core.errors import StorageError

_rc_lock = threading.Lock()  # matplotlib's settings are global


def to_svg(figure: Figure) -> bytes:
    """Return the figure as SVG on a transparent ground; equal figures give equal bytes."""
    content = io.BytesIO()
    with _rc_lock, matplotlib.rc_context({"svg.hashsalt": "fedspd"}):
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return content.getvalue()


def save(figure: Figure, folder: Path | str, name: str) -> list[Path]:
    """Save the figure atomically as name.png and name.pdf; equal figures give equal files."""
    return [_save(figure, Path(folder) / f"{name}.{kind}", kind) for kind in ("png", "pdf")]


def _save(figure: Figure, path: Path, kind: str) -> Path:
    draft = path.with_name(f".{path.name}.part")
    undated = {"CreationDate": None} if kind == "pdf" else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Many publishers refuse Type 3 fonts; 42 is TrueType.
        with _rc_lock, matplotlib.rc_context({"pdf.fonttype": 42}):
            figure.savefig(draft, format=kind, dpi=150, metadata=undated)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise StorageError(
            f"'{path}': the figure could not be written ({error.strerror}). "
            "Make room, or choose a folder that can be written."
        ) from error
    return path
