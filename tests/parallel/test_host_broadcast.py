"""Messages through the coordinator's store, here a dictionary: their order, their length, what is kept, and who has gone."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.parallel import host_broadcast
from tilewright.parallel.host_broadcast import HostBroadcast, ProcessLost


class Store:
    """What JAX's client of the coordinator offers, of which everything here makes use."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.changed = threading.Condition()
        self.most = 0
        self.gone = False

    def key_value_set_bytes(self, key: str, value: bytes | str) -> None:
        with self.changed:
            assert key not in self.entries
            self.entries[key] = value
            self.most = max(self.most, len(self.entries))
            self.changed.notify_all()

    key_value_set = key_value_set_bytes

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: key in self.entries or self.gone, timeout_in_ms / 1000)
            if self.gone:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")
            if key not in self.entries:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.entries[key]

    blocking_key_value_get = blocking_key_value_get_bytes

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.entries = {name: value for name, value in self.entries.items() if not name.startswith(key)}


def started(processes: int, work: Callable[[HostBroadcast], Any], store: Store) -> list[threading.Thread]:
    """Each of the other processes, as a thread."""
    threads = [
        threading.Thread(target=work, args=(HostBroadcast(store, processes, index),), daemon=True)
        for index in range(1, processes)
    ]
    for thread in threads:
        thread.start()
    return threads


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(2, 4))
def test_all_receive_what_was_sent_in_order_and_little_is_kept(messages: list[bytes], processes: int):
    """Pieces of 16 bytes, in windows of 4: no more than two windows, and what tells that they were read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_broadcast, "PIECE", 16)
        patch.setattr(host_broadcast, "WINDOW", 4)
        store = Store()
        received = list[list[bytes]]()

        def follow(broadcast: HostBroadcast) -> None:
            received.append([broadcast.receive() for _ in messages])

        threads = started(processes, follow, store)
        first = HostBroadcast(store, processes, 0)
        for message in messages:
            first.send(message)
        for thread in threads:
            thread.join(20)
        assert received == [messages] * (processes - 1)
        assert store.most <= 2 * 4 + 3 * (processes - 1)


def test_one_that_does_not_follow_is_told_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_broadcast, "WINDOW", 4)
    monkeypatch.setattr(host_broadcast, "SLOWEST_MS", 10)
    first = HostBroadcast(Store(), 2, 0)
    for _ in range(8):
        first.send(b"anything")
    with pytest.raises(ProcessLost, match=r"process 1 has not read messages for 0\.01 s"):
        first.send(b"more")


def test_others_wait_as_long_as_nothing_is_said_and_no_longer_than_the_first_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_broadcast, "WAIT_MS", 5)
    store = Store()
    found = list[object]()

    def follow(broadcast: HostBroadcast) -> None:
        found.append(broadcast.receive())
        with pytest.raises(ProcessLost, match="the first process has ended") as lost:
            broadcast.receive()
        found.append(lost.type)

    (thread,) = started(2, follow, store)
    thread.join(0.05)
    assert (thread.is_alive(), found) == (True, [])
    HostBroadcast(store, 2, 0).send(b"at last")
    while not found:
        thread.join(0.001)
    with store.changed:
        store.gone = True
        store.changed.notify_all()
    thread.join(20)
    assert found == [b"at last", ProcessLost]


def test_one_process_alone_has_nobody_to_tell():
    with pytest.raises(ValueError, match="expected several processes"):
        HostBroadcast()
