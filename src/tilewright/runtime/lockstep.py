"""Lockstep of one engine over several processes: the first process decides, and all run the same programs with the same inputs.

Only the first process has a queue and a clock. Just before it dispatches a program, it broadcasts the program's number and
inputs. The inputs contain all decisions: admissions, cancellations, seeds, masks, kinds of rounds, pages. The size of a message
follows from the program's declared inputs.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tilewright.parallel.host_broadcast import HostBroadcast

NUMBER = struct.Struct("<q")
END = -1
"""Program number of the last message."""


class Lockstep:
    """Sends and receives programs and their inputs as messages.

    Args:
        programs: programs of a decoding, as in `runner.ProgramRunner`.
        declared: keys of all programs that may be run, in the same order in every process.
    """

    def __init__(self, programs: Any, declared: Iterable[Any], broadcast: HostBroadcast):
        self.programs = programs
        self.keys = list(declared)
        self.broadcast = broadcast
        self.numbers = {key: number for number, key in enumerate(self.keys)}
        self.shapes: dict[Any, Any] = {}

    def inputs_of(self, key: Any) -> Any:
        """Returns the declared inputs of a program; none for `allocate`, which makes a new state."""
        if key not in self.shapes:
            self.shapes[key] = () if key.name == "allocate" else self.programs.function(key)[1]
        return self.shapes[key]

    def send(self, key: Any, inputs: tuple[Any, ...]) -> None:
        """Broadcasts the program that this process is about to run, with its inputs.

        Raises:
            ProcessLost: another process does not follow.
        """
        leaves = jax.tree.leaves(inputs)
        wanted = jax.tree.leaves(self.inputs_of(key))
        arrays = [np.asarray(leaf, each.dtype) for leaf, each in zip(leaves, wanted, strict=True)]
        assert [each.shape for each in arrays] == [each.shape for each in wanted], "inputs differ from the declared ones"
        self.broadcast.send(b"".join([NUMBER.pack(self.numbers[key]), *(each.tobytes() for each in arrays)]))

    def end(self) -> None:
        """Broadcasts the end of all programs."""
        self.broadcast.send(NUMBER.pack(END))

    def received(self) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yields the programs of the first process and their inputs, until it ends. Raises `ProcessLost` if it is lost."""
        while True:
            message = self.broadcast.receive()
            (number,) = NUMBER.unpack_from(message)
            if number == END:
                return
            key = self.keys[number]
            yield key, self.read(key, message)

    def read(self, key: Any, message: bytes) -> tuple[Any, ...]:
        """Returns the inputs in a message, as views of its bytes."""
        leaves, tree = jax.tree.flatten(self.inputs_of(key))
        values = []
        at = NUMBER.size
        for each in leaves:
            value = np.frombuffer(message, each.dtype, int(np.prod(each.shape)), at).reshape(each.shape)
            values.append(value)
            at += value.nbytes
        assert at == len(message), "the message differs in size from the declared inputs"
        return jax.tree.unflatten(tree, values)
