"""What a trainer uploads to the Hub."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import trainer as trainer_module


class _Client:
    """The Hub's client, with another `upload_folder`."""

    def __init__(self, client: object, upload_folder: Callable[..., object]):
        self._client = client
        self.upload_folder = upload_folder

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)


@contextmanager
def uploads_without(folder: str) -> Iterator[None]:
    """Surrounds a push of a trainer, which leaves out a folder below what it uploads, also if it uploads in the background.

    Can go when the Trainer has an argument for the patterns that `push_to_hub` ignores.
    """

    def leave_out(upload: Callable[..., object]) -> Callable[..., object]:
        def upload_folder(*args: object, ignore_patterns: Any = None, **kwargs: object) -> object:
            given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
            return upload(*args, ignore_patterns=[*given, folder, f"{folder}/*"], **kwargs)

        return upload_folder

    host: object = trainer_module
    name = "hf_api" if hasattr(host, "hf_api") else "upload_folder"  # older versions have no shared client
    own = getattr(host, name)

    def build_client() -> _Client:
        client = own()
        return _Client(client, leave_out(client.upload_folder))

    setattr(host, name, build_client if name == "hf_api" else leave_out(own))
    try:
        yield
    finally:
        setattr(host, name, own)
