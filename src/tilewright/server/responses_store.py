"""Responses that clients may come back to, in memory: bounded by number and by bytes, and gone when the server ends."""

from collections import OrderedDict
from typing import NamedTuple


class Stored(NamedTuple):
    """A response.

    Attributes:
        answer: as it was answered, JSON.
        conversation: the messages of the chat with the answer at its end, JSON.
    """

    answer: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.conversation)


class ResponsesStore:
    """The latest responses, by who asked for them and their id.

    Attributes:
        size: bytes of all.

    Args:
        most, most_bytes: that are kept; the oldest leave first.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most = most
        self.most_bytes = most_bytes
        self.size = 0
        self.kept: OrderedDict[tuple[int, str], Stored] = OrderedDict()

    def put(self, owner: int, name: str, stored: Stored) -> None:
        self.kept[owner, name] = stored
        self.size += stored.size
        while len(self.kept) > self.most or self.size > self.most_bytes:
            _, gone = self.kept.popitem(last=False)
            self.size -= gone.size

    def get(self, owner: int, name: str) -> Stored | None:
        return self.kept.get((owner, name))

    def delete(self, owner: int, name: str) -> bool:
        """Returns whether there was one."""
        gone = self.kept.pop((owner, name), None)
        self.size -= 0 if gone is None else gone.size
        return gone is not None
