"""Tilewright: irregular models on machines that need fixed shapes.

`__init__.pyi` declares the public names. Each is imported at its first use, since JAX takes a second to import.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
