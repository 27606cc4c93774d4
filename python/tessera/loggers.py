"""Files, Weights & Biases and MLflow for a loop of one's own: the first rank writes, in a thread of its own, and nobody waits for it.

`WandbLogger` needs the package `wandb`, `MLflowLogger` `mlflow` (`mlflow-skinny` is enough); `import tessera` does not.

>>> from tessera.loggers import WandbLogger
>>> with WandbLogger("winds", config={"rate": 1e-3}, mode="offline") as logger:
...     for step in range(session.steps, 1000):
...         done = session.step()
...         logger.log({"loss": done.loss, "norm": done.norm}, step)
"""

import atexit
import os
import queue
import threading
import time
import warnings
from operator import index

from tessera._checkpoint import _agree
from tessera._errors import InvalidArgument
from tessera._groups import world
from tessera._library import classes

__all__ = ["FileLogger", "MLflowLogger", "WandbLogger"]


class _Logger:
    """What both do alike. Derived classes open a run, write numbers into it, and end it: on the first rank alone."""

    def __init__(self, ranks, limit):
        if not limit > 0:
            raise InvalidArgument(f"limit={limit}: give the seconds that close() waits at most")
        on = world() if ranks is None else ranks
        self._limit, self._first, self._told, self._closed = float(limit), on.rank == 0, False, False
        self.error = None
        # One text a rank, as the library returns them, of which the first one has the run.
        self.run_id = _agree(on, "a logger", lambda: str(self._open()) if self._first else "")[0]
        if self._first:
            self._waiting = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._serve, name="tessera logger", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _serve(self):
        while (call := self._waiting.get()) is not None:
            try:
                if self.error is None or call[0] == self._end:
                    call[0](*call[1:])
            except BaseException as error:
                self.error = self.error or error

    def _tell(self):
        if self.error is not None and not self._told:
            self._told = True
            warnings.warn(f"{type(self).__name__} logs no more, and training goes on: {type(self.error).__name__}: {self.error}", stacklevel=3)

    def log(self, values, step):
        """Numbers by name, of this step. All ranks call it with the same names, and with the same values, of which the first rank's are written.

        A tensor is one number, read here, on every rank: of a sharded one that is a collective call. Otherwise nobody waits. Raises TypeError for what is no number, or a step that is not a whole one,
        InvalidArgument after `close`.
        Where writing fails the first rank warns, once, `error` holds what was raised, and no more is written; training goes on on all ranks.
        """
        if self._closed:
            raise InvalidArgument("log() after close()")
        numbers, step = {}, index(step)
        for name, value in values.items():
            try:
                numbers[str(name)] = value.__float__()
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"{name} is {value!r:.60}, and not one number: log tensors of one element, and texts in `config`") from error
        if self._first:
            self._tell()
            self._waiting.put((self._write, numbers, step, time.time()))

    def close(self, failed=False):
        """Ends the run, when everything is written or the limit is over; `with` does so, and the end of the program. Not collective."""
        before, self._closed = self._closed, True
        if not self._first or before:
            return
        atexit.unregister(self.close)
        self._waiting.put((self._end, failed))
        self._waiting.put(None)
        limit = min(self._limit, 10.0) if failed else self._limit  # others wait for a rank that has failed
        self._thread.join(limit)
        if self._thread.is_alive():
            self.error = self.error or TimeoutError(f"what is not written after {limit:g} s is lost")
        self._tell()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(failed=kind is not None)


class FileLogger(_Logger):
    """Files in `folder`, which `tessera report` draws, beside the checkpoints there: metrics.jsonl, metrics.csv, or events of TensorBoard.

    >>> from tessera.loggers import FileLogger
    >>> with FileLogger("runs/7") as logger:             # `tessera report runs/7` writes runs/7/report.html
    ...     for step in (1, 2):
    ...         logger.log({"train/loss": 1.0 / step}, step)
    >>> [line.split(", ")[-1] for line in open("runs/7/metrics.jsonl")]
    ['"train/loss": 1}\\n', '"train/loss": 0.5}\\n']

    `kind`: "json", "csv" or "tensorboard". `start`: how many steps are done, as a checkpoint has it (`session.steps`): what an earlier run has logged of later
    steps is removed, and at 0 an earlier log is moved aside, to metrics.jsonl.1. So a step's own number is that of the steps done with it: the first one is 1. Each call of `log` writes complete lines. `ranks`: a `Group`, default all. `limit`: seconds that
    `close` waits at most, 10 where an exception has ended the loop. `log` and `close` are those of all loggers here; `run_id` is the folder.

    Collective: a folder that cannot be made or written to is a FileError on all ranks, another kind an InvalidArgument.
    """

    def __init__(self, folder, *, kind="json", start=0, ranks=None, limit=60.0):
        self._place = os.fspath(folder), kind, index(start)
        super().__init__(ranks, limit)

    def _open(self):
        self._files = classes.Logger(*self._place)
        return self._place[0]

    def _write(self, numbers, step, _):
        self._files.log(list(numbers), list(numbers.values()), step)

    def _end(self, _):
        self._files = None


class WandbLogger(_Logger):
    """A run of Weights & Biases. `log` and `close` are those of all loggers here.

    >>> with WandbLogger("winds", name="two ranks", config={"rate": 1e-3}, mode="offline") as logger:
    ...     logger.log({"train/loss": done.loss, "validation/error": error}, session.steps)

    `options`: of `wandb.init`, as `dir`, `tags`, `group`, `entity`; `mode="offline"` writes files that `wandb sync` sends later. A run that goes on after a
    checkpoint is given `id=` and `resume="allow"`, of the `run_id` that all ranks have. `ranks`: a `Group`, default all. `limit`: seconds that `close` waits at most,
    10 where an exception has ended the loop.

    Collective: what `wandb.init` raises on the first rank is raised on all.
    """

    def __init__(self, project, *, name=None, config=None, ranks=None, limit=60.0, **options):
        self._options = {"project": project, "name": name, "config": dict(config or {}), **options}
        super().__init__(ranks, limit)

    def _open(self):
        import wandb

        self._run = wandb.init(**self._options)
        return self._run.id

    def _write(self, numbers, step, _):
        self._run.log(numbers, step=step)

    def _end(self, failed):
        self._run.finish(exit_code=int(failed))


class MLflowLogger(_Logger):
    """A run of MLflow.

    >>> with MLflowLogger("winds", name="two ranks", config={"rate": 1e-3}, uri="sqlite:///runs.db") as logger:
    ...     logger.log({"train/loss": done.loss, "validation/error": error}, session.steps)

    `experiment`: by name, made where it is not there. `uri`: a server's address, or a database or folder, for a machine without network; default
    that of MLflow itself. `config`: its parameters; `tags`: texts. `run_id`: of a run to go on with, as all ranks have it in `run_id`. `ranks`: a `Group`, default all.
    `limit`: seconds that `close` waits at most,
    10 where an exception has ended the loop.

    Collective: what MLflow raises on the first rank while the run is opened is raised on all.
    """

    def __init__(self, experiment, *, name=None, config=None, uri=None, tags=None, run_id=None, ranks=None, limit=60.0):
        self._given = experiment, name, dict(config or {}), uri, {str(k): str(v) for k, v in (tags or {}).items()}, run_id
        super().__init__(ranks, limit)

    def _open(self):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        experiment, name, config, uri, tags, run_id = self._given
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            place = self._client.create_experiment(experiment) if found is None else found.experiment_id
            run_id = self._client.create_run(place, tags=tags, run_name=name).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run = run_id
        if config:
            self._client.log_batch(run_id, params=[Param(str(key), str(value)) for key, value in config.items()])
        return run_id

    def _write(self, numbers, step, when):
        self._client.log_batch(self._run, metrics=[self._metric(name, value, int(1000 * when), step) for name, value in numbers.items()])

    def _end(self, failed):
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")
