"""Places for checkpoints beside folders: whatever fsspec reads and writes."""

import contextlib
import inspect
import os
import queue
import threading

import torch

from tessera._callbacks import Callbacks, address
from tessera._errors import InvalidArgument, NotAvailable
from tessera._library import classes, ops
from tessera._state import to_bytes

# As the library numbers them.
_CALLS = ("list", "size", "read", "create", "write", "commit", "discard", "put", "remove", "make")


def _tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class FsspecIO:
    """A place for checkpoints on any file system of fsspec: an object store, memory, or another one.

    >>> place = ts.FsspecIO("memory://runs/7")     # "s3://bucket/runs/7", anon=False: options go to the file system
    >>> ts.Checkpointer(place, keep_last=3).save("step-100", {"net": net})
    >>> saved = ts.CheckpointReader(place, "step-100")

    `url`: with its protocol, or a path of `filesystem`, an object of fsspec. Each rank makes one for the same place. `timeout`: seconds after which a call
    that has no answer is an error, on all ranks; nothing is asked again but by the file system itself.

    A save claims the place by a put that the store refuses where there is one already (S3, GCS, Azure, memory): of two jobs that save at once one gets
    `CheckpointLocked`. What interrupted saves left stays there. Where the file system has no such puts, `Checkpointer.warnings` says so, and that one job
    saves at a time is up to the user. A url of local files is the folder itself, with its lock.

    Raises `NotAvailable` without fsspec, or the package of the protocol.
    """

    def __init__(self, url, *, filesystem=None, timeout=60.0, **options):
        try:
            from fsspec import AbstractFileSystem
            from fsspec.asyn import AsyncFileSystem
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem
        except ImportError as error:
            raise NotAvailable("FsspecIO needs the package fsspec: pip install fsspec") from error
        self._timeout = float(timeout)
        if not self._timeout > 0:
            raise InvalidArgument(f"FsspecIO: a timeout of {timeout} seconds: give a positive number")
        if filesystem is not None and options:
            raise InvalidArgument(f"FsspecIO: the file system is given, so that {', '.join(options)} cannot be options of it")
        try:
            self._fs, self._root = (filesystem, os.fspath(url).rstrip("/")) if filesystem is not None else url_to_fs(os.fspath(url), **options)
        except ImportError as error:
            raise NotAvailable(f"FsspecIO: {url}: {error}") from error
        except ValueError as error:
            raise InvalidArgument(f"FsspecIO: {url}: {error}") from error
        if not isinstance(self._fs, AbstractFileSystem):
            raise InvalidArgument(f"FsspecIO: {type(self._fs).__name__} is no file system of fsspec")
        if type(self._fs) is LocalFileSystem:
            self._handle = classes.CheckpointIO(0, self._root)
            return
        inner = self._fs
        while isinstance(getattr(inner, "fs", None), AbstractFileSystem):
            inner = inner.fs
        name, base = ("_pipe_file", AsyncFileSystem) if inner.async_impl else ("pipe_file", AbstractFileSystem)
        pipe = getattr(type(inner), name)
        # Where a file is written by one call of its own it is never seen half; and other writers' may be refused.
        self._at_once = pipe is not getattr(base, name)
        self._decides = self._at_once and "mode" in inspect.signature(pipe).parameters
        self._has_folders = not inner.async_impl
        self._open = {}
        self._callbacks = Callbacks()
        self._function = self._callbacks.calling(self._serve)
        self._handle = classes.CheckpointIO(address(self._function), self._fs.unstrip_protocol(self._root))

    def _serve(self, numbers):
        call, *numbers = numbers
        name, *data = (to_bytes(t) for t in ops.taken())
        path = f"{self._root}/{name.decode()}" if name else self._root
        answers = queue.SimpleQueue()

        def work():
            try:
                answers.put((getattr(self, f"_{_CALLS[call]}")(path, *numbers, *data), None))
            except BaseException as error:
                answers.put((None, error))

        # A thread of its own, which is left behind if there is no answer.
        threading.Thread(target=work, daemon=True).start()
        try:
            answer, error = answers.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(f"{_CALLS[call]}: no answer within {self._timeout:g} s") from None
        if error is not None:
            raise error
        return answer if answer is None else [answer if isinstance(answer, torch.Tensor) else torch.tensor(int(answer))]

    def _list(self, path):
        self._fs.invalidate_cache(path)
        try:
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            found = []
        names = sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in found if entry.strip("/") != path.strip("/"))
        return _tensor("".join(f"{name}\0" for name in names).encode())

    def _info(self, path):
        self._fs.invalidate_cache(path.rsplit("/", 1)[0])
        try:
            return self._fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _size(self, path):
        info = self._info(path)
        if info is not None and (info["type"] != "file" or info["size"] is None):
            raise IsADirectoryError(f"{path} is a {info['type']} of {info['size']} bytes")
        return None if info is None else info["size"]

    def _read(self, path, offset, count):
        return _tensor(self._fs.cat_file(path, start=offset, end=offset + count))

    def _create(self, path, number):
        self._open[number] = self._fs.open(path, "wb"), path
        return True

    def _write(self, _, number, data):
        return self._open[number][0].write(data)

    def _commit(self, _, number):
        self._open[number][0].close()
        return self._open.pop(number) is not None

    def _discard(self, _, number):
        file, path = self._open.pop(number)
        # What was not closed is not to appear when the object goes.
        with contextlib.suppress(Exception):
            file.discard()
            file.closed = True
        with contextlib.suppress(Exception):
            file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(path)
        return True

    def _put(self, path, if_absent, data):
        if if_absent and not self._decides:
            return None
        if not self._at_once:
            beside = f"{path}.tmp-{os.urandom(8).hex()}"
            self._fs.pipe_file(beside, data)
            self._fs.mv(beside, path)
            return True
        try:
            self._fs.pipe_file(path, data, **({"mode": "create"} if if_absent else {}))
        except FileExistsError:
            return False
        return True

    def _remove(self, path):
        info = self._info(path)
        try:
            if info is not None:
                self._fs.rmdir(path) if info["type"] == "directory" else self._fs.rm_file(path)
        except FileNotFoundError:
            info = None
        return info is not None

    def _make(self, path):
        # Of an object store, folders are names, and to make one could make a bucket.
        if self._has_folders:
            self._fs.makedirs(path, exist_ok=True)
        return True


def place_of(folder):
    """The handle of a place, or of a folder."""
    return folder._handle if isinstance(folder, FsspecIO) else classes.CheckpointIO(0, os.fspath(folder))
