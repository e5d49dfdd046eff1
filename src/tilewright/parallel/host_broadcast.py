"""Ordered messages from the first process to all other processes, over the hosts.

Messages pass through the key-value store of JAX's coordinator, to which every process is connected. A broadcast by devices
(`multihost_utils.broadcast_one_to_all`) would wait for the programs that run on them, and devices would wait between messages.
"""

import struct
from typing import Any

import jax
from jax._src import distributed  # the store has no public name; `multihost_utils` and Orbax use it this way

PIECE = 1 << 20
"""Maximum bytes of an entry of the store."""
WINDOW = 64
"""Entries that are deleted together after all processes have read them. The store holds two windows at most."""
WAIT_MS = 60_000
"""Milliseconds that a process waits for an entry before it retries."""
SLOWEST_MS = 300_000
"""Milliseconds that another process may lag behind."""
LENGTH = struct.Struct("<Q")
FOLDER = "tilewright/broadcast"


class ProcessLost(RuntimeError):
    """Another process has ended or does not respond."""


class HostBroadcast:
    """Channel of messages: the first process sends, and all other processes receive each message in order.

    A process has one channel at most.

    Args:
        client: client of the coordinator; by default that of `jax.distributed`.
        processes: number of processes.
        index: index of this process.
    """

    def __init__(self, client: Any = None, processes: int | None = None, index: int | None = None):
        found = distributed.global_state.client if client is None else client
        if found is None:
            raise ValueError("expected several processes (jax.distributed), found one")
        self.client: Any = found
        self.processes = jax.process_count() if processes is None else processes
        self.index = jax.process_index() if index is None else index
        self.entries = 0

    def send(self, message: bytes) -> None:
        """Sends a message to all processes.

        Raises:
            ProcessLost: a process has not read the entries of two windows ago.
        """
        framed = LENGTH.pack(len(message)) + message
        for start in range(0, len(framed), PIECE):
            self.make_room()
            self.client.key_value_set_bytes(self.key(self.entries), framed[start : start + PIECE])
            self.entries += 1

    def make_room(self) -> None:
        """Deletes the window before the last one, ahead of the first entry of a new window."""
        window = self.entries // WINDOW - 2
        if self.entries % WINDOW or window < 0:
            return
        for index in range(1, self.processes):
            try:
                self.client.blocking_key_value_get(f"{FOLDER}/read/{window}/{index}", SLOWEST_MS)
            except jax.errors.JaxRuntimeError as error:
                raise ProcessLost(f"process {index} has not read messages for {SLOWEST_MS / 1000:g} s") from error
        for folder in ("entry", "read"):
            self.client.key_value_delete(f"{FOLDER}/{folder}/{window}/")

    def receive(self) -> bytes:
        """Waits for the next message and returns it.

        Raises:
            ProcessLost: the first process has ended.
        """
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
                if "DEADLINE_EXCEEDED" not in str(error):  # at a deadline, nothing was sent: retry
                    raise ProcessLost("the first process has ended") from error
        self.entries += 1
        if self.entries % WINDOW == 0:
            self.client.key_value_set(f"{FOLDER}/read/{self.entries // WINDOW - 1}/{self.index}", "")
        return entry

    @staticmethod
    def key(entry: int) -> str:
        return f"{FOLDER}/entry/{entry // WINDOW}/{entry}"
