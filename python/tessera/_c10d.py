"""Registers the backend of `torch.distributed.init_process_group("tessera")`: ranks of one host that share memory.

The library runs this source too, when `torch.ops.load_library` opens it without the package: it needs nothing of the package.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "tessera"


def _meet(options, _backend_options):
    """The backend of one group. The library says what it wants to leave at the store and to find there."""
    meeting = torch.classes.tessera.BackendMeeting(
        options.group_rank, options.group_size, options.group_id, list(options.global_ranks_in_group), options.timeout.total_seconds()
    )
    while (question := meeting.next())[0] != "done":
        kind, key, text = question
        try:
            if kind == "put":
                options.store.set(key, text)
                meeting.answer("")
            else:
                options.store.wait([key], timedelta(seconds=float(text)))
                meeting.answer(options.store.get(key).decode())
        except Exception as error:  # the library tells the other ranks, and says it again below
            meeting.fail(str(error))
    return dist.ProcessGroup.unbox(meeting.group())._get_backend(torch.device("cpu"))


def register():
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _meet, extended_api=True, devices=["cpu"])


register()
