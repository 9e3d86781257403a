"""Reads a configuration file and `a.b=c` overrides into a `Config`; whatever does not belong there is a `ConfigError`.

config = load("configs/quickstart.yaml", ["run.steps=10", "roles.actor.optimizer.lr=1e-5"])
"""

import copy
import difflib
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from hybridflow.config.schema import (
    Config,
    ConfigError,
    CriticConfig,
    MegatronRoleConfig,
    ReferenceConfig,
    RewardConfig,
    TrainedConfig,
    one_line,
)

# Keys that users of other trainers reach for, or that name what this version cannot do yet.
_HINTS = {
    "reward.weight": "the score of reward.kind counts once, that of roles.reward beside it reward.model_weight times",
    "roles.reference.release_weights": "it has no optimizer to rebuild weights from: use roles.reference.offload=[params]",
}


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """The configuration in the YAML file `path` with `overrides` ("a.b=c") applied, all types checked.

    Raises:
        ConfigError: one line that names the key, its value and what was expected.
    """
    raw = _merge_overrides(_read(path), overrides or [])
    _refuse_unknown(raw, Config, "")
    config = _structured(raw)
    # roles that an algorithm needs and the file leaves out have nothing to choose that the actor's do not answer already
    if config.algorithm.kl_coefficient > 0 and config.roles.reference is None:
        config.roles.reference = ReferenceConfig(**_of_the_actor(config, MegatronRoleConfig))
        config.roles.reference.offload = [what for what in config.roles.actor.offload if what == "params"]  # all that it has
    if config.algorithm.name in ("ppo", "safe_rlhf") and config.roles.critic is None:
        config.roles.critic = CriticConfig(**_of_the_actor(config, TrainedConfig, but="optimizer"))
    if config.algorithm.name == "safe_rlhf":
        config.roles.cost_critic = config.roles.cost_critic or copy.deepcopy(config.roles.critic)
        if config.cost is None and config.roles.cost is not None:
            config.cost = RewardConfig(kind="model")
    return config


def _of_the_actor(config: Config, section: type, but: str = "") -> dict[str, Any]:
    """The actor's values of the keys that `section` has; its class is its own."""
    left_out = ("implementation", but)
    return {f.name: copy.deepcopy(getattr(config.roles.actor, f.name)) for f in fields(section) if f.name not in left_out}


def save(config: Config, path: str | Path) -> None:
    """Write the resolved configuration as YAML, such that `load` gives it back."""
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """The values of nested sections by their keys, such as roles.actor.tp; an empty section is a value."""
    if isinstance(values, dict) and (values or not path):
        return {k: v for key, value in values.items() for k, v in flat(value, f"{path}.{key}" if path else str(key)).items()}
    return {path: values}


def _read(path: str | Path) -> DictConfig:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        raw = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {one_line(error)[:500]}") from error
    except OSError as error:  # of the file, or OmegaConf's own where there is a single value in it
        raise ConfigError(f"config file {path} cannot be read ({error}): write sections of key: value") from error
    if not isinstance(raw, DictConfig):
        raise ConfigError(f"config file {path} holds a {type(raw).__name__}: write sections of key: value")
    return raw


def _merge_overrides(raw: DictConfig, overrides: list[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} is not of the form key=value, such as run.steps=10")
        try:
            raw = OmegaConf.merge(raw, OmegaConf.from_dotlist([override]))
        except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:  # TypeError: a list over a section
            raise ConfigError(f"override {override!r} cannot be read: {one_line(error)}") from error
    return raw


def _refuse_unknown(node: Any, schema: type, path: str) -> None:
    """Walk sections: every key must be a field of the section's dataclass, and every section a mapping."""
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{path}={node!r} is not a section: write its keys, such as {path}.{fields(schema)[0].name}")
    hints = get_type_hints(schema)
    for key in node:
        full = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise ConfigError(_unknown(full, str(key), path, list(hints)))
        section = _section(hints[key])
        if OmegaConf.is_interpolation(node, key):
            continue
        value = node._get_node(key)
        if section is None:
            _refuse_other_kind(full, value, hints[key])
            continue
        if value is not None and value._is_none():
            continue  # the type check that follows knows where null is allowed
        _refuse_unknown(node[key], section, full)


def _refuse_other_kind(key: str, value: Any, hint: Any) -> None:
    """What OmegaConf would end in a TypeError for, or take a number as true."""
    wrong_list = isinstance(value, DictConfig) and not value._is_none() and get_origin(hint) is list
    wrong_section = isinstance(value, ListConfig) and not value._is_none() and get_origin(hint) is dict
    if wrong_list or wrong_section:
        raise ConfigError(f"{key}={OmegaConf.to_container(value)} is not {_expected(hint)}")
    if hint is bool and isinstance(value, Node) and type(value._value()) in (int, float):
        raise ConfigError(f"{key}={value._value()!r} is not true or false")


def _unknown(full: str, key: str, path: str, known: list[str]) -> str:
    if full in _HINTS:
        return f"unknown key {full}: {_HINTS[full]}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f"unknown key {full}: did you mean {path + '.' if path else ''}{near[0]}?"
    elsewhere = [name for name in _all_keys(Config, "") if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key {full}: did you mean {elsewhere[0]}?"
    return f"unknown key {full}: {path or 'the top level'} has {', '.join(known)}"


def _all_keys(schema: type, path: str) -> list[str]:
    keys = []
    for name, hint in get_type_hints(schema).items():
        full = f"{path}.{name}" if path else name
        section = _section(hint)
        keys += [full] if section is None else [full, *_all_keys(section, full)]
    return keys


def _section(hint: Any) -> type | None:
    """The dataclass that a type hint stands for (also `X | None`), or None for a value."""
    for part in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if is_dataclass(part):
            return part
    return None


def _structured(raw: DictConfig) -> Config:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), raw)
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ConfigError(f"{min(missing)} is not set: give it in the config file or as {min(missing)}=...")
        return OmegaConf.to_object(merged)
    except ValidationError as error:
        raise ConfigError(_ill_typed(error, raw)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from error


def _ill_typed(error: ValidationError, raw: DictConfig) -> str:
    key = error.full_key or ""
    if not key:  # of an interpolation that stands for a whole section OmegaConf does not say where it is
        what = str(error).partition(" value:")[0].rstrip(".")
        return f"a section that refers to another by ${{...}} is of another kind ({what}): write out its keys"
    hint: Any = Config
    for part in key.partition("[")[0].split("."):
        hint = get_type_hints(_section(hint))[part] if _section(hint) else dict
    value = OmegaConf.select(raw, key, throw_on_missing=False, default=None)
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    shown = "null" if value is None else repr(value)
    return f"{key}={shown} is not {_expected(hint, in_list='[' in key)}"


def _expected(hint: Any, in_list: bool = False) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [part for part in get_args(hint) if part is not type(None)]
        return f"{_expected(kinds[0], in_list)} or null"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is list:
        item = get_args(hint)[0]
        lists = {int: "a list of integers", float: "a list of numbers", str: "a list of strings"}
        return _expected(item) if in_list else lists[item]
    if get_origin(hint) is dict or hint is dict:
        return "a section of key: value"
    if is_dataclass(hint):
        return "a section of key: value"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]
