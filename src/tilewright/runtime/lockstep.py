"""One engine over several processes: the first one decides, and all run the same programs with the same inputs.

What must be the same is what the device is given. So the first process alone has a queue and a clock, and tells the others of
each program, just before it sends it, by its number and its inputs. These hold all that was decided: who was admitted and given
up, seeds, masks, kinds of rounds, pages. How large a message is follows from the program's declared inputs.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tilewright.parallel.host_broadcast import HostBroadcast
from tilewright.runtime.programs import ProgramKey, Programs

NUMBER = struct.Struct("<q")
END = -1
"""Number of no program: nothing comes behind it."""


class Lockstep:
    """Programs and their inputs as messages.

    Args:
        declared: all programs that may be run, in the same order in every process.
    """

    def __init__(self, programs: Programs, declared: Iterable[ProgramKey], broadcast: HostBroadcast):
        self.programs = programs
        self.keys = list(declared)
        self.broadcast = broadcast
        self.numbers = {key: number for number, key in enumerate(self.keys)}
        self.shapes: dict[ProgramKey, Any] = {}

    def inputs_of(self, key: ProgramKey) -> Any:
        """Declared inputs of a program; none of `allocate`, which makes the state anew."""
        if key not in self.shapes:
            self.shapes[key] = () if key.name == "allocate" else self.programs.function(key)[1]
        return self.shapes[key]

    def tell(self, key: ProgramKey, inputs: tuple[Any, ...]) -> None:
        """Tells the others what this process is about to run.

        Raises:
            ProcessLost: one of them does not follow.
        """
        leaves = jax.tree.leaves(inputs)
        wanted = jax.tree.leaves(self.inputs_of(key))
        parts = [np.asarray(leaf, each.dtype) for leaf, each in zip(leaves, wanted, strict=True)]
        assert [part.shape for part in parts] == [each.shape for each in wanted], "programs have declared inputs"
        self.broadcast.send(b"".join([NUMBER.pack(self.numbers[key]), *(part.tobytes() for part in parts)]))

    def end(self) -> None:
        """Tells the others that nothing comes any more."""
        self.broadcast.send(NUMBER.pack(END))

    def heard(self) -> Iterator[tuple[ProgramKey, tuple[Any, ...]]]:
        """What the first process runs, until it ends. Raises `ProcessLost` where it ends without a word."""
        while True:
            message = self.broadcast.receive()
            (number,) = NUMBER.unpack_from(message)
            if number == END:
                return
            key = self.keys[number]
            yield key, self.read(key, message)

    def read(self, key: ProgramKey, message: bytes) -> tuple[Any, ...]:
        """The inputs in a message, which are read in place."""
        leaves, tree = jax.tree.flatten(self.inputs_of(key))
        values = []
        at = NUMBER.size
        for each in leaves:
            value = np.frombuffer(message, each.dtype, int(np.prod(each.shape)), at).reshape(each.shape)
            values.append(value)
            at += value.nbytes
        assert at == len(message), "a message has what the program declares"
        return jax.tree.unflatten(tree, values)
