"""Store of responses for the Responses API, in memory and bounded by number and bytes."""

from collections import OrderedDict
from typing import NamedTuple


class Stored(NamedTuple):
    """Stored response.

    Attributes:
        answer: response body as JSON.
        conversation: chat messages up to and including the response, as JSON.
    """

    answer: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.conversation)


class ResponsesStore:
    """Latest responses, by API key and response id. Evicts the oldest ones.

    Attributes:
        size: total size in bytes.

    Args:
        most: largest number of responses.
        most_bytes: largest total size.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most = most
        self.most_bytes = most_bytes
        self.size = 0
        self.responses: OrderedDict[tuple[int, str], Stored] = OrderedDict()

    def add(self, owner: int, name: str, stored: Stored) -> None:
        """Stores a response. `owner`: index of the API key."""
        self.responses[owner, name] = stored
        self.size += stored.size
        while len(self.responses) > self.most or self.size > self.most_bytes:
            _, evicted = self.responses.popitem(last=False)
            self.size -= evicted.size

    def get(self, owner: int, name: str) -> Stored | None:
        return self.responses.get((owner, name))

    def delete(self, owner: int, name: str) -> bool:
        """Deletes a response. Returns False for an unknown one."""
        deleted = self.responses.pop((owner, name), None)
        self.size -= 0 if deleted is None else deleted.size
        return deleted is not None
