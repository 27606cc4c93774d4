"""Registers the backend of `torch.distributed.init_process_group("tessera")`: memory between ranks of one host, Gloo between hosts.

The library runs this source too, when `torch.ops.load_library` opens it without the package: it needs nothing of the package.
"""

import logging
import socket
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "tessera"


def _route(host, port):
    """The numeric address of this host on the way to another one; "" if there is no way."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, _, _, target in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind) as way:
                way.connect(target)  # sends nothing
                return way.getsockname()[0]
        except OSError:
            continue
    return ""


def _is_loopback(address):
    return not address or address == "::1" or address.startswith("127.")


def _address(options, life=""):
    """The address that this rank listens on: the one on the way to the job's store, as other hosts go there too.

    `life`: what distinguishes the keys of these ranks from those that ranks before them left.
    On the host of the store that way may be the loopback, which no other host reaches: then the one on the way to a rank of another host.
    """
    store = options.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    mine = _route(getattr(store, "host", None) or socket.gethostname(), getattr(store, "port", None) or 1)
    keys = [f"{life}/address of {rank}" for rank in range(options.group_size)]
    options.store.set(keys[options.group_rank], mine)
    if _is_loopback(mine):
        options.store.wait(keys, options.timeout)
        others = (options.store.get(key).decode() for key in keys)
        mine = next((_route(other, 1) for other in others if not _is_loopback(other)), mine)
    return mine or "127.0.0.1"


def _answer(options, kind, key, text):
    """What a meeting of ranks asks for."""
    store = options.store
    if kind == "address":
        return _address(options, key)
    if kind == "put":
        store.set(key, text)
        return ""
    if kind == "add":
        return str(store.add(key, int(text)))
    if kind == "delete":
        return "yes" if store.delete_key(key) else ""
    if kind == "check":
        return "yes" if store.check(key.split("\n")) else ""
    store.wait(key.split("\n"), timedelta(seconds=float(text)))
    return store.get(key).decode() if kind == "get" else ""


def _meet(options, _backend_options, host=""):
    """The backend of one group. The library says what it wants to leave at the store and to find there.

    `host`: what this rank says of its host; "" for what the kernel says.
    """
    ranks = list(options.global_ranks_in_group)
    meeting = torch.classes.tessera.BackendMeeting(options.group_rank, options.group_size, options.group_id, ranks, options.timeout.total_seconds(), host)
    while (question := meeting.next())[0] != "done":
        try:
            meeting.answer(_answer(options, *question))
        except Exception as error:  # the library tells the other ranks, and says it again below
            meeting.fail(str(error))
    backend = dist.ProcessGroup.unbox(meeting.group())._get_backend(torch.device("cpu"))
    name, reason, refused = meeting.way()
    logging.getLogger(NAME).info("group %s goes over %s: %s", options.group_id, name, reason)
    if refused and options.group_rank == 0:
        warnings.warn(f"group {options.group_id}: ranks of one host do not share memory, and use Gloo: {refused}", stacklevel=2)
    return backend


def register():
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _meet, extended_api=True, devices=["cpu"])


register()
