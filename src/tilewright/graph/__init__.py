"""Graphs in fixed shapes: neighbour tables, message passing, attention, sampling, loaders, partitioning and data sets.

`__init__.pyi` declares the public names. Each is imported at its first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
