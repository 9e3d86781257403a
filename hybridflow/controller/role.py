"""What the controller asks of a role: a layout, a context for its calls, and methods that declare a protocol."""

import contextlib
from typing import ClassVar

from megatron_ext.layout import Layout


class Role:
    """One rank's part of a distributed program.

    Attributes:
        name: the role's name in the config.
        layout: its ranks' parallel dimensions, over which batches are split.
        peers: the roles of this process by name, itself included: roles that share ranks hand over weights directly.
    """

    name: str
    layout: Layout
    peers: ClassVar[dict[str, "Role"]] = {}

    def context(self) -> contextlib.AbstractContextManager:
        """Entered around every call."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Release what the end of the process would not."""
