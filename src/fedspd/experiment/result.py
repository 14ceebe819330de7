"""What a finished run gives: its summary, its events and the clients' models."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd.core.errors import ConfigError, StorageError
from fedspd.experiment.build import Experiment
from fedspd.experiment.frames import as_frame, html_table, overview
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json
from fedspd.storage.history import history, reach
from fedspd.storage.run_folder import RESTORE, RunFolder
from fedspd.storage.temporary import TemporaryFolder


@dataclass(frozen=True)
class Result:
    """A finished run: its summary, its events and the clients' models."""

    folder: Path
    experiment: Experiment = field(repr=False)
    summary: Json = field(repr=False)
    temporary: TemporaryFolder | None = field(default=None, repr=False)  # without `out`

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """The test accuracy of every client, after the final phase."""
        return np.array(self.summary["clients"]["accuracy"], dtype=float)

    @property
    def scores(self) -> dict[str, NDArray[np.float64]]:
        """The other scores of every client by name, such as `macro_f1`, or `rmse` and `r2`."""
        clients, names = self.summary["clients"], self.summary.get("metrics") or {}
        return {name: np.array(clients[name], dtype=float) for name in names}

    @property
    def mixture(self) -> NDArray[np.float64]:
        """The mixture weights of every client, by cluster; no columns if the method has none."""
        mixture = self.summary["clients"]["mixture"]
        return np.array(mixture or [[]] * self.experiment.plan.clients, dtype=float)

    @property
    def classes(self) -> list[str]:
        """The names of the classes in the order of a model's outputs; none in a regression."""
        return self.experiment.federation.names_of_classes

    def history(self) -> list[Json]:
        """Return the mean scores of every evaluated round, and what it had cost until then.

        Each has `round`, `accuracy`, `test_loss`, the other scores, and the sums so far: `bytes`
        (point-to-point), `seconds` and `steps`.
        """
        return history(RunFolder(self.folder))

    def reach(self, target: float) -> Json | None:
        """Return the first entry of the history that reaches a mean accuracy; None: there is none.

        In a regression, the target is a mean RMSE.
        """
        return reach(self.history(), target)

    def to_pandas(self) -> Any:
        """Return the history as a DataFrame."""
        return as_frame(self.history())

    def figures(self) -> dict[str, Any]:
        """Return the figures of the run by name, as matplotlib figures."""
        from fedspd.reporting.run_figures import draw_run

        return draw_run(self.folder)

    def _repr_html_(self) -> str:
        return html_table([overview(self.summary)], f"fedspd: {self.folder}")

    def events(self) -> list[Json]:
        """Return the events of all rounds and of the final phase."""
        return list(RunFolder(self.folder).events())

    def state(self, client: int) -> Any:
        """Return the method's final state of one client, such as centers_CSP with C = 1."""
        return self._runner(client).state

    def predict(self, client: int, x: Any) -> Tensor:
        """Return the outputs of the client's model for examples x, as they are in the dataset.

        x is an array, a tensor or a list. It is scaled as the client's training examples were.
        """
        runner = self._runner(client)
        inputs = self.experiment.federation.inputs(client, x)
        return runner.plan.algorithm.predict(runner.plan.learner, runner.state, [inputs])[0]

    def model(self, client: int) -> nn.Module:
        """Return the client's personalised model as an ordinary module, for inputs as scaled."""
        module = self._runner(client).personal_model()
        if module is None:
            raise ConfigError(
                f"method = '{self.summary['method']}': it does not end in one model per client. "
                "Use Result.predict."
            )
        return module

    def _runner(self, client: int) -> BlockRunner:
        """Return a runner with the client's state from the last checkpoint."""
        clients = self.experiment.plan.clients
        if not isinstance(client, int | np.integer) or not 0 <= client < clients:
            raise ConfigError(f"client = {client!r}: expected an integer from 0 to {clients - 1}.")
        runner = BlockRunner(
            self.experiment.plan.select_clients(range(int(client), int(client) + 1))
        )
        latest = RunFolder(self.folder).latest()
        if latest is None:
            raise StorageError(
                f"'{self.folder}': no checkpoint, so the clients' models are lost. {RESTORE}"
            )
        runner.load(latest[0])
        return runner
