"""Worker processes that decode the samples of Python's own datasets for a `Loader`, whose threads wait for them."""

import contextlib
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
from multiprocessing import forkserver
from multiprocessing.reduction import recv_handle, send_handle

import torch
from torch.utils import _pytree as pytree

from tessera._errors import Error, InvalidArgument

_BATCH, _ERROR = b"b", b"e"
_MAIN = "a script starts its work under `if __name__ == \"__main__\":`, for its workers import it, and the classes of its datasets are at the top of a module"


class WorkerPool:
    """`count` processes, each with all of the datasets. A batch is decoded by one of them into memory that both see, and is not copied here.

    The processes come from Python's fork server, a process of its own: none is a fork of one that holds groups, threads or devices. Each ends when this process
    does, however it ends.
    """

    def __init__(self, readers, count):
        context, self._problem, self._idle, self._processes = multiprocessing.get_context("forkserver"), "", queue.SimpleQueue(), []
        if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:
            # The server would import the program without its arguments; each worker does with them, and finds torch there.
            context.set_forkserver_preload(["torch"])
        try:
            for number in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, readers), name=f"loader worker {number}", daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._idle.put((process, ours))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise InvalidArgument(
                f"a dataset that worker processes read is pickled, and this one cannot be ({error}): give functions by name, and open files when they are read first"
            ) from error
        except (OSError, EOFError) as error:
            self.close()
            raise InvalidArgument(f"no worker process could be started ({type(error).__name__}: {error}): {_MAIN}") from error

    def read(self, dataset, indices):
        """The tensors of a batch and how its samples are nested. Raises what the dataset raised; after a death always, by that."""
        process, pipe = self._idle.get()
        try:
            if self._problem:
                raise Error(self._problem)
            try:
                pipe.send((dataset, indices))
                answer = pipe.recv_bytes()
                handle = recv_handle(pipe) if answer[:1] == _BATCH else None
            except (OSError, EOFError) as error:
                self._problem = self._problem or self._told(process, indices)
                raise Error(self._problem) from error
            if handle is None:
                raise pickle.loads(answer[1:])
            return _batch_of(handle, answer[1:])
        finally:
            self._idle.put((process, pipe))

    def _told(self, process, indices):
        process.join(10)  # its pipe is closed: it has ended, or is about to
        code, hint = process.exitcode, ""
        if code == -signal.SIGKILL:
            hint = "; the system may have run out of memory"
        elif code == 1:
            hint = f"; what it raised is above: {_MAIN}"
        how = "" if code is None else f" by signal {-code}" if code < 0 else f" with status {code}"
        which = f"samples {', '.join(map(str, indices[:4]))}{', ...' if len(indices) > 4 else ''}"
        return f"the {process.name} (process {process.pid}) has ended{how} while it was to read {which}{hint}"

    def close(self):
        """Ends the processes; a read in progress raises."""
        self._problem = self._problem or "the loader is closed"
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)


def _batch_of(handle, told):
    try:
        layout, size, nested = pickle.loads(told)
        memory = _mapped(handle, size)
    finally:
        os.close(handle)
    return [_part(memory, *one) for one in layout], pytree.tree_structure(nested)


def _mapped(handle, size):
    return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)


def _part(memory, dtype, shape, begin):
    count = dtype.itemsize * torch.Size(shape).numel()
    return memory[begin : begin + count].view(dtype).view(shape)


def _placed(tensors, nesting):
    """Memory that holds them, and what the reader has to know of it."""
    layout, size = [], 64
    for t in tensors:
        if t.device.type != "cpu" or t.layout != torch.strided:
            raise TypeError(f"a sample of a worker process is in memory of the host and dense, not on {t.device} and {t.layout}: leave devices to Loader(device=)")
        layout.append((t.dtype, tuple(t.shape), size))
        size += -(-t.nbytes // 64) * 64
    handle = os.memfd_create("tessera batch")
    os.ftruncate(handle, size)
    memory = _mapped(handle, size)
    for t, one in zip(tensors, layout):
        _part(memory, *one).copy_(t)
    return handle, _BATCH + pickle.dumps((layout, size, pytree.tree_unflatten(list(range(nesting.num_leaves)), nesting)))


def _portable(error):
    """The exception itself where it survives being pickled; with the place where it was raised."""
    where = "in a worker process:\n" + "".join(traceback.format_exception(error))
    try:
        error.add_note(where)
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(where)
    return _ERROR + pickle.dumps(error)


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(pipe, readers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank ends, and this one with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # Of the fork server every worker would have the same numbers.
    random.seed(torch.seed())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    with contextlib.suppress(EOFError, OSError), torch.no_grad():
        while True:
            dataset, indices = pipe.recv()
            try:
                handle, answer = _placed(*readers[dataset](indices))
            except BaseException as error:
                handle, answer = None, _portable(error)
            pipe.send_bytes(answer)
            if handle is not None:
                send_handle(pipe, handle, None)
                os.close(handle)
