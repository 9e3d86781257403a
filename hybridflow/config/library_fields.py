"""What the sections `megatron` and `engine_args` may hold: the fields of the installed libraries' own dataclasses, and values
of their types.

Read from their source, since importing them takes seconds and torch.
"""

import ast
import difflib
import functools
import importlib.util
import warnings
from pathlib import Path
from typing import Any

from hybridflow.config.schema import Config, ConfigError, one_line
from megatron_ext.hf_config import HFConfig

# section -> package, (module file, class) of the dataclass and its bases
_SOURCES = {
    "megatron": (
        "megatron.core",
        (("transformer/transformer_config.py", "TransformerConfig"), ("model_parallel_config.py", "ModelParallelConfig")),
    ),
    "engine_args": ("vllm", (("engine/arg_utils.py", "EngineArgs"),)),
}


_SIMPLE = {"bool": bool, "int": int, "float": float, "str": str}
_OBJECTS = ("Callable", "dtype", "AttnBackend", "ContextManager")  # Python's, which no YAML can write
_ALIASES = "vllm", "config/*.py"  # where the names of vLLM's literals are defined


def check_library_field(path: str, key: str, value: Any) -> None:
    """Raises ConfigError: the section `path`, such as roles.actor.megatron, has no `key` in the installed library, or one of
    another type. Of types only bool, int, float, str, None and literals are looked at: whatever else a field may be passes."""
    section = path.rpartition(".")[2]
    known = _known(section)
    if not known:
        return
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        owner = _SOURCES[section][1][0][1]
        raise ConfigError(
            f"unknown key {path}.{key}: " + (f"did you mean {near[0]}?" if near else f"{owner} has no such field")
        )
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(known[key])}
    if names.intersection(_OBJECTS) and "str" not in names and value is not None:
        raise ConfigError(f"{path}.{key}={value!r} must be {ast.unparse(known[key])}, which a config cannot hold: leave it out")
    choices = _choices(known[key])
    if choices is not None and not any(_fits(value, choice) for choice in choices):
        wanted = " or ".join(choice.__name__ if isinstance(choice, type) else repr(choice) for choice in choices)
        raise ConfigError(f"{path}.{key}={value!r} must be {wanted.replace('NoneType', 'null')}")


def _fits(value: Any, choice: Any) -> bool:
    """Whether `value` is the literal `choice`, or one of the type `choice`; a whole number is a float as well, true is no 1."""
    if not isinstance(choice, type):
        return type(value) is type(choice) and value == choice
    return type(value) is choice or (choice is float and type(value) is int)


def _choices(annotation: ast.expr) -> list[Any] | None:
    """The simple types and literals that an annotation names; None where it names anything else."""
    match annotation:
        case ast.Constant(value=None):
            return [type(None)]
        case ast.Name(id=name) if name in _SIMPLE:
            return [_SIMPLE[name]]
        case ast.Name(id=name) if name in _literals():
            return _choices(_literals()[name])
        case ast.Constant(value=str(text)):  # an annotation in quotes
            return _choices(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _all([left, right])
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _all([inner, ast.Constant(None)])
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return _all(parts)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [part.value for part in parts] if all(isinstance(part, ast.Constant) for part in parts) else None
    return None


def _all(annotations: list[ast.expr]) -> list[Any] | None:
    found = [_choices(annotation) for annotation in annotations]
    return None if None in found else [choice for choices in found for choice in choices]


@functools.cache
def _literals() -> dict[str, ast.expr]:
    """vLLM's names for literals, such as CacheDType."""
    package, pattern = _ALIASES
    found: dict[str, ast.expr] = {}
    for root in _roots(package):
        for file in sorted(Path(root).glob(pattern)):
            for line in ast.parse(file.read_text()).body:
                target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
                match getattr(line, "value", None), target:
                    case ast.Subscript(value=ast.Name(id="Literal")) as literal, ast.Name(id=name):
                        found[name] = literal
    return found


def _roots(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []


@functools.cache
def _known(section: str) -> dict[str, ast.expr]:
    """Annotations by field; empty where the library isn't installed or is built otherwise: it speaks for itself then, when it
    starts."""
    package, classes = _SOURCES[section]
    parent, _, child = package.partition(".")
    found: dict[str, ast.expr] = {}
    for root in _roots(parent):  # of the top level: a submodule's would import it
        for file, name in classes:
            path = Path(root) / child / file
            tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
            bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
            found |= {line.target.id: line.annotation for body in bodies for line in body if isinstance(line, ast.AnnAssign)}
    return found


def check_transformer_config(config: Config, role: str, hf: HFConfig) -> None:
    """What `roles.X.megatron` adds up to with the rest is a TransformerConfig. Imports torch and Megatron.

    Raises:
        ConfigError: Megatron's own words, by which two fields contradict each other.
    """
    import torch

    settings = config.megatron_roles()[role]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_ext.model import transformer_config

        try:
            transformer_config(
                hf, config.layout(role), getattr(torch, config.dtype(role)), settings.recompute, dict(settings.megatron)
            )
        except (AssertionError, ValueError, TypeError) as error:
            what = one_line(error) or type(error).__name__
            raise ConfigError(f"roles.{role}.megatron={dict(settings.megatron)} is refused by Megatron: {what}") from error
