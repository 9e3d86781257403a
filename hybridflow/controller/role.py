"""What the controller asks of a role: a layout, a context for its calls, and methods that declare a protocol."""

import contextlib
from typing import Any, ClassVar

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

    @classmethod
    def stand_by(cls, name: str, config: Any) -> None:
        """Called instead of the constructor on ranks of the role's pool that are not the role's, for what all must do."""

    def context(self) -> contextlib.AbstractContextManager:
        """Entered around every call."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Release what the end of the process would not."""
