"""Classes of the user's own that a configuration names by import path: package.module:Class."""

import importlib
import os
import sys

from hybridflow.config.schema import ConfigError, one_line


def load_role(key: str, path: str, methods: tuple[str, ...]) -> type:
    """The class of a role: `load_class`, where each of `methods` also declares how its arguments travel.

    Raises:
        ConfigError: as `load_class`, or a method lacks `@remote`, as one that overrides another's does without its own.
    """
    found = load_class(key, path, methods)
    for method in methods:
        if not hasattr(getattr(found, method), "protocol"):
            raise ConfigError(
                f"{key}={path!r}: the method {method} declares no transfer protocol: put @remote(...) of"
                " hybridflow.controller.protocols above it"
            )
    return found


def load_class(key: str, path: str, methods: tuple[str, ...]) -> type:
    """The class at `path`, looked for in the working directory as well, with all of `methods`.

    Raises:
        ConfigError: it isn't there, or its module cannot be imported; names `key`.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key}={path!r} must look like package.module:Class")
    if os.getcwd() not in sys.path:  # a console script's path starts with the folder of the script
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that ends itself would end the command without a word
        what = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{key}={path!r}: importing {module_name} failed: {what}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        names = sorted(n for n, value in vars(module).items() if isinstance(value, type) and value.__module__ == module_name)
        raise ConfigError(f"{key}={path!r}: {module_name} has no class {name}: there are {', '.join(names) or 'none'}")
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"{key}={path!r}: the class lacks the method {missing[0]}: it needs {' and '.join(methods)}")
    return found
