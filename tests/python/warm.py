"""Processes that need not import torch: a server has done so, and forks what it is asked to run. Starting Python with torch is most of what a rank of a test costs.

    warm.py serve SOCKET                        in an environment as the programs' own
    python -I -S warm.py run SOCKET PROGRAM...  as `python PROGRAM...`, with this process' environment, folder, standard files, signals and exit status

What it runs differs from a process of its own in what importing reads of the environment (the number of threads is set again), in its parent, and in that
modules are not taken apart when it ends.
"""

import ctypes
import json
import os
import signal
import socket
import sys


def end_with_parent():
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def end(status):
    """Ends as an interpreter does, its threads and exit functions included, but for taking torch's modules apart, which takes a second and a half."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def run(path, arguments):
    """In place of the program: asks for it, passes signals on, and ends as it ends."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda which, _: server.send(str(which).encode()))
    asked = json.dumps({"folder": os.getcwd(), "environment": dict(os.environ), "arguments": arguments}).encode()
    file = os.memfd_create("asked")
    os.write(file, asked)
    socket.send_fds(server, [b"run"], [0, 1, 2, file])
    status = int(server.recv(64) or signal.SIGKILL)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def become(files, asked):
    """In the fork: the process that was asked for, up to its program."""
    end_with_parent()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["arguments"]
    torch = sys.modules["torch"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count()))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def received(connection):
    try:
        return connection.recv(64)
    except OSError:  # an asker that was killed
        return b""


def files_of(connection):
    """What an asker sends first: its standard files and what it asks for."""
    try:
        return socket.recv_fds(connection, 16, 4)[1]
    except OSError:
        return []


def serve(path):
    """Forks a process for each that asks, until it is ended; in the fork it returns what is to be run."""
    import gc
    import selectors

    end_with_parent()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)  # whoever finds it may connect
    import torch._dynamo  # noqa: F401  what the first step of an optimizer imports
    import tessera  # noqa: F401

    gc.freeze()  # no collection of a fork walks through the million objects of torch
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ, None)
    children = {}  # connection -> pid
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                files = files_of(connection)
                if not files:  # the asker was ended before it could ask
                    connection.close()
                    continue
                asked = json.loads(os.pread(files[3], os.fstat(files[3]).st_size, 0))
                pid = os.fork()
                if pid == 0:
                    waiting.close()
                    for other in (listener, connection, *children):
                        other.close()
                    os.close(files[3])
                    become(files, asked)
                    return
                for file in files:
                    os.close(file)
                children[connection] = pid
                waiting.register(connection, selectors.EVENT_READ, None)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, connection)
            elif key.data is None:  # a signal, or the asker's end
                if key.fileobj.fileno() < 0:
                    continue  # its child's end came with it
                said = received(key.fileobj)
                if key.fileobj in children:
                    os.kill(children[key.fileobj], int(said or signal.SIGKILL))
                if not said:
                    waiting.unregister(key.fileobj)
            else:  # a child has ended
                connection = key.data
                _, status = os.waitpid(children.pop(connection), 0)
                waiting.unregister(key.fd)
                os.close(key.fd)
                try:
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                except OSError:
                    pass  # the asker has gone before
                if connection in (k.fileobj for k in waiting.get_map().values()):
                    waiting.unregister(connection)
                connection.close()


if __name__ == "__main__":
    what, path, *rest = sys.argv[1:]
    if what == "run":
        run(path, rest)
    serve(path)
    import runpy

    status = 0
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else stop.code is not None
        if not isinstance(stop.code, (int, type(None))):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(int(status))
