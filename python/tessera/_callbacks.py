"""Functions of Python's that the library calls."""

import ctypes

from tessera._errors import CommError
from tessera._library import ops

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64)


class Callbacks:
    """Makes functions that the library can call, and keeps what these raised, so that it can be the cause of what the library raises."""

    def __init__(self):
        self.by_text = {}

    def calling(self, function):
        """`function(numbers)`, which returns tensors, or None where there is nothing. To be kept while the library may call it."""

        def call(numbers, count):
            try:
                given = function([numbers[i] for i in range(count)])
                if given is None:
                    return 0
                ops.deliver(given)
                return 1
            except BaseException as error:  # no exception passes through the library
                between_ranks = isinstance(error, CommError)
                text = str(error) if between_ranks else f"{type(error).__name__}: {error}"
                if len(self.by_text) >= 8:
                    self.by_text.clear()
                self.by_text[text] = error
                ops.refuse(text, type(error).__name__ if between_ranks else "")
                return -1

        return _FUNCTION(call)


def address(function):
    """Of what `Callbacks.calling` made."""
    return ctypes.cast(function, ctypes.c_void_p).value


def as_raised(keeper, call, *arguments):
    """Calls the library. Where a function of Python's has raised meanwhile, which `keeper.raised` holds, that is raised as it was."""
    try:
        return call(*arguments)
    except RuntimeError:
        if keeper.raised is not None:
            raise keeper.raised from None
        raise


def with_cause(all_callbacks, call, *arguments):
    """Calls the library. What it raises has the exception of Python's as its cause whose words it carries; an interruption is raised as it is."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        for callbacks in all_callbacks:
            found = next((text for text in callbacks.by_text if text in str(error)), None)
            if found is not None:
                cause = callbacks.by_text[found]
                if not isinstance(cause, Exception):
                    raise cause
                raise error from cause
        raise
