"""Which keys the sections `megatron` and `engine_args` may hold: the fields of the installed libraries' own dataclasses.

Read from their source, since importing them takes seconds and torch.
"""

import ast
import difflib
import functools
import importlib.util
from pathlib import Path

from hybridflow.config.schema import ConfigError

# section -> package, (module file, class) of the dataclass and its bases
_SOURCES = {
    "megatron": (
        "megatron.core",
        (("transformer/transformer_config.py", "TransformerConfig"), ("model_parallel_config.py", "ModelParallelConfig")),
    ),
    "engine_args": ("vllm", (("engine/arg_utils.py", "EngineArgs"),)),
}


def check_library_field(path: str, key: str) -> None:
    """Raises ConfigError: the section `path`, such as roles.actor.megatron, has no `key` in the installed library."""
    section = path.rpartition(".")[2]
    known = _known(section)
    if known and key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        owner = _SOURCES[section][1][0][1]
        raise ConfigError(
            f"unknown key {path}.{key}: " + (f"did you mean {near[0]}?" if near else f"{owner} has no such field")
        )


@functools.cache
def _known(section: str) -> frozenset[str]:
    """Empty where the library isn't installed or is built otherwise: it speaks for itself then, when it starts."""
    package, classes = _SOURCES[section]
    parent, _, child = package.partition(".")
    spec = importlib.util.find_spec(parent)  # of the top level: a submodule's would import it
    found: set[str] = set()
    for root in spec.submodule_search_locations or () if spec else ():
        for file, name in classes:
            path = Path(root) / child / file
            tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
            bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
            found |= {line.target.id for body in bodies for line in body if isinstance(line, ast.AnnAssign)}
    return frozenset(found)
