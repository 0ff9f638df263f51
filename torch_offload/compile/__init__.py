"""``torch.compile`` over offload tensors: one graph, with ``offload::fetch`` and ``offload::stash`` in it as operations.

`fakes` says what the package's operations give while they are traced, `higher_order` what operations are given that take
functions, `export` what exported programs are taken apart into, `inference` in what mode a graph is traced, `partition` that
what was fetched is fetched again for backward and never kept, `inductor` how graphs that hold offload tensors become code,
`order` in what order, and `on_device` what of them is rewritten.
How it fits together: docs/design/compile.md.
"""

import torch

from torch_offload import _C
from torch_offload.compile import export, fakes, higher_order, inference


def register() -> None:
    """Called once, by the import of the package. Inductor asks for its part when it first compiles something."""
    fakes.register()
    higher_order.register()
    export.register()
    inference.register()


def changed(error: Exception) -> ImportError:
    """Says what of inductor's is not as it has to be."""
    return ImportError(
        f"torch_offload: inductor has changed in torch {torch.__version__} ({error}), and its graphs can't hold offload "
        'tensors; compile with backend="aot_eager", or use a torch that this release of torch_offload supports.'
    )


def register_with_inductor() -> None:
    """Called when inductor first compiles something, of whatever program.

    Raises:
        ImportError: this torch's inductor lacks what has to be overridden, and the process has offload tensors.
    """
    try:
        from torch_offload.compile import inductor

        inductor.register()
    except (AttributeError, ImportError) as error:
        if not _C.in_use():
            return  # nobody's concern
        raise changed(error) from error
