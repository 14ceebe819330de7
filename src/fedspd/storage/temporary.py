"""A folder for the records of a run that nobody asked to keep."""

import shutil
import tempfile
import weakref
from pathlib import Path


class TemporaryFolder:
    """A folder that exists as long as this object does; `tempfile`'s own warns when it goes."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fedspd-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
