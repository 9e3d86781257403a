"""Checks of where rewards and costs come from: the sections `reward` and `cost`, and the models that score."""

import json
import re
import socket
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from hybridflow.config.model_folder import TOKENIZER_FILES, tensor_shapes
from hybridflow.config.schema import Config, ConfigError, one_line

REACH_SECONDS = 10
_ONE_RANK = ("tp", "pp", "vpp", "cp", "ep", "etp")  # of a model that transformers runs, which is whole on every rank


def check_scores(config: Config) -> None:
    """Raises ConfigError: a kind lacks what it needs, or something is given that would not be used."""
    for name, settings in config.scores().items():
        for kind, key in (("function", "function"), ("http", "url")):
            if settings.kind != kind and getattr(settings, key):
                raise ConfigError(f"{name}.{key}={getattr(settings, key)} would not be used: set {name}.kind={kind}")
        if settings.kind == "http":
            _check_url(f"{name}.url", settings.url)
        if settings.kind == "model" and settings.model_weight:
            raise ConfigError(f"{name}.model_weight={settings.model_weight} is for a model beside another kind: leave it out")
        if getattr(config.roles, name) is None and (settings.kind == "model" or settings.model_weight):
            what = f"{name}.kind=model" if settings.kind == "model" else f"{name}.model_weight={settings.model_weight}"
            raise ConfigError(f"{what} needs a model that scores: give roles.{name}.model.path")
    for name, role in config.scoring_roles().items():
        settings = config.scores().get(name)
        if settings is None or (settings.kind != "model" and not settings.model_weight):
            raise ConfigError(f"roles.{name} would not be used: set {name}.kind=model, or {name}.model_weight to add its score")
        if role.model is None or not role.model.path:
            raise ConfigError(f"roles.{name}.model.path is not set: give the folder of a classifier with one label")
        if role.backend == "megatron" and role.trust_remote_code:
            raise ConfigError(f"roles.{name}.trust_remote_code=true would not be used: set roles.{name}.backend=hf")
        if role.backend == "hf":
            _check_whole(name, config)


def check_classifier(config: Config, role: str) -> None:
    """The folder of a model that transformers runs: a classifier with one label, complete safetensors and a tokenizer.

    Raises:
        ConfigError: names the file or the number.
    """
    folder = Path(config.model_path(role))
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(f"roles.{role}.model.path: model folder {folder} {what}: give a folder in HF format")
    try:
        fields = json.loads((folder / "config.json").read_text())
        labels = len(fields.get("id2label") or ("LABEL_0", "LABEL_1"))  # transformers' default
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{folder}/config.json is not the config of a model: {error}") from error
    if labels != 1:
        raise ConfigError(f"roles.{role}.model.path: {folder} has {labels} labels, a model that scores has 1 (id2label)")
    longest, limit = (
        config.sampling.max_prompt_tokens + config.sampling.max_response_tokens,
        fields.get("max_position_embeddings"),
    )
    if isinstance(limit, int) and longest > limit:
        raise ConfigError(
            f"sampling.max_prompt_tokens={config.sampling.max_prompt_tokens} + sampling.max_response_tokens="
            f"{config.sampling.max_response_tokens} = {longest} is more than the {role}'s max_position_embeddings={limit}:"
            " lower one of them"
        )
    if not sum(prod(shape) for shape in tensor_shapes(folder).values()):
        raise ConfigError(f"model folder {folder} holds no weights")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model folder {folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json into it")


def _check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
    except ValueError:  # a port that is no number, brackets that don't close
        usable = False
    if not usable:
        raise ConfigError(f"{key}={url!r} is not the address of a server, such as http://127.0.0.1:8000/score")


def check_reachable(key: str, url: str) -> None:
    """Something listens at the address; every response of a run would get a 0 otherwise."""
    parts = urlsplit(url)
    address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection(address, timeout=REACH_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{key}={url}: no server answers at {address[0]} port {address[1]} ({one_line(error)}): start it first, or mend the"
            " address"
        ) from error


def _check_whole(name: str, config: Config) -> None:
    role = config.scoring_roles()[name]
    for key in _ONE_RANK:
        if getattr(role, key) != 1:
            raise ConfigError(
                f"roles.{name}.{key}={getattr(role, key)} splits a model, but backend=hf has all of it on every rank:"
                f" use 1, or roles.{name}.backend=megatron"
            )
    if role.forward_micro_batch_tokens < 1:
        raise ConfigError(
            f"roles.{name}.forward_micro_batch_tokens={role.forward_micro_batch_tokens} is too small: use at least 1"
        )
    for what in role.offload:
        if what != "params":
            raise ConfigError(f"roles.{name}.offload={role.offload}: {what!r} cannot be offloaded, it is never trained")
    if role.megatron or role.recompute != "none":
        key = "megatron" if role.megatron else "recompute"
        raise ConfigError(f"roles.{name}.{key} would not be used by backend=hf: leave it out")
