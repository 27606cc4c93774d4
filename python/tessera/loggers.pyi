from collections.abc import Mapping
from typing import Any, Self

import torch

from tessera import Group, PathLike

__all__ = ['FileLogger', 'MLflowLogger', 'WandbLogger']

class _Logger:
    error: BaseException | None
    run_id: str
    def log(self, values: Mapping[str, float | torch.Tensor], step: int) -> None: ...
    def close(self, failed: bool = False) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None: ...

class FileLogger(_Logger):
    def __init__(self, folder: PathLike, *, kind: str = 'json', start: int = 0, ranks: Group | None = None, limit: float = 60.0) -> None: ...

class WandbLogger(_Logger):
    def __init__(self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None, ranks: Group | None = None, limit: float = 60.0, **options: Any) -> None: ...

class MLflowLogger(_Logger):
    def __init__(self, experiment: str, *, name: str | None = None, config: Mapping[str, Any] | None = None, uri: str | None = None, tags: Mapping[str, str] | None = None, run_id: str | None = None, ranks: Group | None = None, limit: float = 60.0) -> None: ...
