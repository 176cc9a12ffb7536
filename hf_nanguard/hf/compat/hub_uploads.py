"""What a trainer uploads to the Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import trainer as trainer_module


class _Uploads:
    """The Hub's client, with uploads of folders that leave one folder out; everything else is the client's own."""

    def __init__(self, client: Any, folder: str):
        self._client = client
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def upload_folder(self, *args: Any, ignore_patterns: Any = None, **kwargs: Any) -> Any:
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
        ignored = [*given, self._folder, f"{self._folder}/*"]
        return self._client.upload_folder(*args, ignore_patterns=ignored, **kwargs)


@contextmanager
def uploads_without(folder: str) -> Iterator[None]:
    """Surrounds a push of a trainer, which leaves out a folder below what it uploads, also if it uploads in the background.

    Can go when the Trainer has an argument for the patterns that `push_to_hub` ignores.
    """
    host: Any = trainer_module
    client = host.hf_api
    host.hf_api = lambda: _Uploads(client(), folder)
    try:
        yield
    finally:
        host.hf_api = client
