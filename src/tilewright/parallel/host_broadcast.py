"""Messages of the first process to all others, from host to host, in order.

They go through the key-value store of JAX's coordinator, which every process is connected to anyway. A broadcast by the devices
(`multihost_utils.broadcast_one_to_all`) would wait for whatever runs there, and would have devices wait while there is nothing
to say.
"""

import struct
from typing import Any

import jax
from jax._src import distributed  # the store has no public name; `multihost_utils` and Orbax reach it in this way

PIECE = 1 << 20
"""Bytes of a message that go into one entry of the store."""
WINDOW = 64
"""Entries that are deleted together, once all have read them. No more than two windows are there at a time."""
WAIT_MS = 60_000
"""How long a process waits for an entry before it asks again."""
SLOWEST_MS = 300_000
"""How far behind another process may be."""
LENGTH = struct.Struct("<Q")
FOLDER = "tilewright/broadcast"


class ProcessLost(RuntimeError):
    """Another process has gone, or says nothing any more."""


class HostBroadcast:
    """Order of messages, of which there may be one in a process: the first one sends, all others receive each of them.

    Args:
        client: of the coordinator; by default the one that `jax.distributed` has.
        processes, index: how many there are, and which of them this is.
    """

    def __init__(self, client: Any = None, processes: int | None = None, index: int | None = None):
        found = distributed.global_state.client if client is None else client
        if found is None:
            raise ValueError("expected several processes (jax.distributed), found this one alone")
        self.client: Any = found
        self.processes = jax.process_count() if processes is None else processes
        self.index = jax.process_index() if index is None else index
        self.entries = 0

    def send(self, message: bytes) -> None:
        """Sends a message to all. Raises `ProcessLost` where one of them has not read what was sent long before."""
        framed = LENGTH.pack(len(message)) + message
        for start in range(0, len(framed), PIECE):
            self.make_room()
            self.client.key_value_set_bytes(self.key(self.entries), framed[start : start + PIECE])
            self.entries += 1

    def make_room(self) -> None:
        """Before a window's first entry, deletes the window before the last one."""
        window = self.entries // WINDOW - 2
        if self.entries % WINDOW or window < 0:
            return
        for index in range(1, self.processes):
            try:
                self.client.blocking_key_value_get(f"{FOLDER}/read/{window}/{index}", SLOWEST_MS)
            except jax.errors.JaxRuntimeError as error:
                raise ProcessLost(f"process {index} has not followed for {SLOWEST_MS / 1000:g} s") from error
        for folder in ("entry", "read"):
            self.client.key_value_delete(f"{FOLDER}/{folder}/{window}/")

    def receive(self) -> bytes:
        """The next message; waits for it. Raises `ProcessLost` where the first process has gone."""
        framed = self.next_entry()
        (length,) = LENGTH.unpack_from(framed)
        while len(framed) < LENGTH.size + length:
            framed += self.next_entry()
        return framed[LENGTH.size :]

    def next_entry(self) -> bytes:
        entry = None
        while entry is None:
            try:
                entry = self.client.blocking_key_value_get_bytes(self.key(self.entries), WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):  # else nothing was sent
                    raise ProcessLost("the first process has gone") from error
        self.entries += 1
        if self.entries % WINDOW == 0:
            self.client.key_value_set(f"{FOLDER}/read/{self.entries // WINDOW - 1}/{self.index}", "")
        return entry

    @staticmethod
    def key(entry: int) -> str:
        return f"{FOLDER}/entry/{entry // WINDOW}/{entry}"
