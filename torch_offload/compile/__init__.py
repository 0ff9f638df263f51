"""``torch.compile`` over offload tensors: one graph, with ``offload::fetch`` and ``offload::stash`` in it as operations.

`fakes` says what the package's operations give while they are traced, `partition` that what was fetched is fetched again for
backward and never kept, `inductor` how graphs that hold offload tensors become code, and `on_device` what of them is rewritten.
How it fits together: docs/design/compile.md.
"""

from torch_offload.compile import fakes


def register() -> None:
    """Called once, by the import of the package. Inductor asks for its part when it first compiles something."""
    fakes.register()
