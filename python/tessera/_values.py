"""Plain values as the bytes that checkpoints keep: numbers and texts as C++ does, anything else as JSON."""

import base64
import collections
import json
import struct

import torch

from tessera._errors import InvalidArgument

KINDS = ("integer", "real", "text", "bytes", "json")
_OF_ELEMENTS = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_PLAIN = "None, bool, int, float, str, bytes, and lists, tuples, sets and dictionaries of them"


def real_bytes(number):
    """As C++ writes a real: its bits in hexadecimal digits."""
    return struct.pack(">d", number).hex().encode()


def real_from(text):
    try:
        return struct.unpack(">d", bytes.fromhex(text.decode()))[0]
    except (ValueError, struct.error) as error:
        raise InvalidArgument(f"{text!r:.60} is not a real number") from error


def _tagged(value, where, tensor):
    """`value` in terms of JSON, bit by bit: what JSON has no word for is a dictionary of one key with a "$"."""
    inner = lambda v, key: _tagged(v, f"{where}.{key}", tensor)  # noqa: E731
    if value is None or type(value) in (bool, int, str) or isinstance(value, float):
        return float(value) if isinstance(value, float) else value
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and tensor:
        return {"$tensor": tensor(where, value)}
    if type(value) is list:
        return [inner(v, i) for i, v in enumerate(value)]
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return {"$tuple": [inner(v, i) for i, v in enumerate(value)]}
    if type(value) in (set, frozenset):
        return {"$set" if type(value) is set else "$frozenset": sorted((inner(v, "element") for v in value), key=repr)}
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        if type(value) is not collections.Counter and all(type(k) is str and k[:1] != "$" for k in value):
            return {k: inner(v, k) for k, v in value.items()}
        tag = "$Counter" if type(value) is collections.Counter else "$dict"
        return {tag: [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    also = " or tensors" if tensor else ""
    raise InvalidArgument(f"'{where}' is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not keep: it keeps {_PLAIN}{also}")


def _untagged(value, tensors):
    if isinstance(value, list):
        return [_untagged(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$tensor":
        return tensors[content]
    if tag in _OF_ELEMENTS:
        return _OF_ELEMENTS[tag](_untagged(content, tensors))
    if tag in ("$dict", "$Counter"):
        pairs = {_untagged(k, tensors): _untagged(v, tensors) for k, v in content}
        return pairs if tag == "$dict" else collections.Counter(pairs)
    return {k: _untagged(v, tensors) for k, v in value.items()}


def as_json(value, where, tensor=None):
    """The bytes of any value. `tensor(name, t)` keeps a tensor and returns its name; without it tensors are refused."""
    return json.dumps(_tagged(value, where, tensor), ensure_ascii=False, separators=(",", ":")).encode()


def encode(value, where, tensor=None):
    """The kind and the bytes of a value, as C++ writes them where it has such values."""
    if type(value) is int:
        return "integer", str(value).encode()
    if isinstance(value, float):
        return "real", real_bytes(value)
    if type(value) is str:
        return "text", value.encode()
    if isinstance(value, (bytes, bytearray)):
        return "bytes", bytes(value)
    return "json", as_json(value, where, tensor)


def kind_like(value):
    """What a value is taken for where nothing is kept of its kind, as C++ keeps none: the kind of `value`."""
    return encode(value, "")[0] if isinstance(value, (int, float, str, bytes)) else "bytes"


def tensors_in(kind, data):
    """Names of the tensors that a value has."""
    found = []

    def look(value):
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(inner)
        if isinstance(value, dict) and list(value) == ["$tensor"]:
            found.append(value["$tensor"])

    if kind == "json":
        look(json.loads(data))
    return found


def decode(kind, data, where, tensors=None):
    """The value; its tensors are those of `tensors`, by name."""
    try:
        if kind == "integer":
            return int(data)
        if kind == "real":
            return real_from(data)
        return data.decode() if kind == "text" else data if kind == "bytes" else _untagged(json.loads(data), tensors or {})
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"the value '{where}' of the checkpoint is no {kind}: {data!r:.60}") from error
