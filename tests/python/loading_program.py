"""The library is opened while another thread opens libraries all the time, holding the interpreter's lock, as imports do.

Arguments: the library, and `alone` (in the main thread) or `package` (imported by a thread).
"""

import ctypes
import sys
import threading

import torch
import torch.distributed as dist

LIBRARY, WAY = sys.argv[1:]
ended = threading.Event()


def open_libraries():
    # Until the library is there: the rest of the package's import needs the interpreter too.
    while not ended.is_set() and not torch.ops.loaded_libraries:
        ctypes.CDLL("libm.so.6")


def load():
    try:
        if WAY == "package":
            __import__("tessera")
        else:
            torch.ops.load_library(LIBRARY)
        sys.stdout.write(f"registered: {'tessera' in dist.Backend.backend_list}\n")
    finally:
        ended.set()


other = threading.Thread(target=open_libraries if WAY == "alone" else load)
other.start()
(load if WAY == "alone" else open_libraries)()
other.join()
