"""Weights of the models that a user names: safetensors, unless pickles are allowed."""

from pathlib import Path

from ...errors import ArgumentError

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PICKLE_HELP = (
    "Also load weights that are not safetensors, such as pytorch_model.bin. These are pickles, and a pickle can run any code "
    "on this machine: only for models that you trust."
)


def require_safetensors(name: str, flag: str, allow_pickle: bool) -> dict[str, bool]:
    """Returns the arguments of `from_pretrained` that make it load safetensors only, none if pickles are allowed.

    A folder that has only pickles is refused. Errors name `flag`.
    """
    if allow_pickle:
        return {}
    files = (
        sorted(Path(name).glob("*")) if Path(name).is_dir() else []
    )  # none if it cannot be read, which is reported later
    pickles = [file.name for file in files if file.suffix in PICKLES]
    if pickles and not any(file.suffix in (".safetensors", ".gguf") for file in files):
        raise ArgumentError(
            f"{flag} must contain safetensors, got {name!r}, where {pickles[0]} is a pickle, which can run any code. Save the model "
            "again with save_pretrained, or pass --allow_pickle if you trust it."
        )
    return {"use_safetensors": True}
