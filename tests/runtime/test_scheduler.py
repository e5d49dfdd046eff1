"""Everybody is served, the oldest first, within the pages that there are; nobody writes to a page that another one reads."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.operations import UNMAPPED
from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime import groups as groups_module
from tilewright.runtime import pages as pages_module
from tilewright.runtime import scheduler as scheduler_module
from tilewright.runtime.groups import PageGroup, usable_prefix
from tilewright.runtime.layout import window_pages
from tilewright.runtime.output import OutputProcessor
from tilewright.runtime.pages import Pages
from tilewright.runtime.request import GenerateRequest, RequestHandle
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.scheduler import Chunk, RunningSequence, Scheduler, TokenSequence
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.snapshots import Snapshots

PAGE = 4
CONTEXT = 48
WIDTH = 4
TABLE = ShapeTable(batches=(1, 2, 3), capacities=(CONTEXT,), chunks=(8, 16))


class NoText(StreamDecoder):
    """Nothing here reads text."""

    def __init__(self) -> None: ...

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def sequence(number: int, prompt: list[int], new: int) -> TokenSequence:
    sampling = Sampling(new, ignore_eos=True)
    return TokenSequence(
        RequestHandle(GenerateRequest(prompt, sampling), number),
        lambda update: None,
        OutputProcessor(0, prompt, sampling, NoText()),
    )


def make(
    pages: int,
    prefix_cache: bool = True,
    tapping: tuple[str, ...] = (),
    window: int | None = None,
    snapshots: int | None = None,
) -> Scheduler:
    """With a group of layers that see a window, if one is given, of as few pages as a request by itself needs.

    Args:
        snapshots: of states that lie in no page; None where there are no such.
    """
    least = 0 if window is None else window_pages(window, max(TABLE.chunks[-1], 2 * WIDTH), PAGE, CONTEXT)
    windows = [] if window is None else [PageGroup(Pages(least, PAGE), window)]
    whole = Pages(pages, PAGE)
    kept = None if snapshots is None or not prefix_cache else Snapshots(snapshots, whole, least=PAGE)
    return Scheduler(TABLE, whole, CONTEXT, prefix_cache, tapping, windows, kept)


class Simulation:
    """A device that commits a drawn number of tokens for each round, and is read one dispatch late.

    Attributes:
        written: for each page what was computed for it: (text up to there, position) for each of its entries.
        states, copies: the text that went through the state of each slot, and of each snapshot.
    """

    def __init__(self, scheduler: Scheduler, rng: np.random.Generator):
        self.scheduler = scheduler
        self.rng = rng
        self.flight: list[tuple[list[RunningSequence], int]] = []
        self.done: list[int] = []
        self.written: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.copies: dict[int, tuple[int, ...]] = {}

    def step(self) -> None:
        """As the engine steps, with checks of what a device would need."""
        scheduler = self.scheduler
        for running in scheduler.admit():
            self.check_reads(running, running.filled)
        for _ in range(int(self.rng.integers(1, 4))):
            chunks = scheduler.next_chunks()
            if chunks:
                assert chunks[0].running is next(running for running in scheduler.running if not running.prefilled), (
                    "the oldest comes first"
                )
            assert len(chunks) <= max(1, scheduler.table.together[0])
            self.carry(chunks)
            for chunk in chunks:
                assert chunk.size == chunks[0].size
                assert chunk.count <= chunk.size
                assert chunk.count > 0 or not chunk.running.started, "only the first one may have no position"
                self.write(chunk.running, chunk.start, chunk.count)
                scheduler.on_prefilled(chunk)
        sent = self.send()
        while len(self.flight) > (1 if sent else 0):
            self.read(*self.flight.pop(0))

    def send(self) -> bool:
        runnable = self.scheduler.runnable()
        batch, rounds = self.scheduler.make_room(runnable, int(self.rng.integers(1, 9)), WIDTH) if runnable else ([], 0)
        if not batch:
            return False
        for running in batch:
            reach = self.scheduler.reach(running, rounds, WIDTH)
            for group, row in zip(self.scheduler.groups, running.groups, strict=True):
                assert len(row.columns) * PAGE >= reach, "a block reaches a page that is not there"
                first = running.last_position // PAGE
                assert all(group.pages.ref_counts[page] == 1 for page in row.columns[first:]), "somebody else reads there"
            self.check_window(running, running.last_position)
        self.scheduler.on_dispatched(batch, rounds, rounds * WIDTH)
        self.flight.append((batch, rounds))
        return True

    def read(self, batch: list[RunningSequence], rounds: int) -> None:
        for running in batch:
            processor = running.sequence.processor
            new = int(self.rng.integers(rounds, rounds * WIDTH + 1))
            left = processor.end - len(processor.prompt) - len(processor.tokens)
            committed = [] if processor.finish_reason else self.rng.integers(0, 3, min(new, left)).tolist()
            here = self.scheduler.slots[running.slot] is running
            before = running.sequence.length
            self.scheduler.on_completed(
                running, rounds, rounds * WIDTH, len(committed), "eagle3" if self.rng.integers(2) else "ngram"
            )
            if not committed:
                continue
            processor.add_round(committed, 0, 0, ())
            if here:
                self.write(running, before - 1, len(committed))
            if processor.finish_reason is not None:
                self.done.append(running.sequence.number)
                (self.scheduler.leave if here else lambda running: self.scheduler.drop(running.sequence))(running)

    def write(self, running: RunningSequence, start: int, count: int) -> None:
        tokens = tuple(running.sequence.tokens)
        for n, row in enumerate(running.groups):
            for position in range(start, start + count):
                page = row.columns[position // PAGE]
                if n == 0 or page != UNMAPPED:  # of what was committed long ago, a window's page may be gone
                    self.written[n, page, position % PAGE] = tokens[: position + 1]

    def carry(self, chunks: Sequence[Chunk]) -> None:
        """Takes states through chunks: each begins anew, goes on, or begins with a snapshot, of what comes before it."""
        if self.scheduler.prefix_cache and self.scheduler.snapshots is None:
            return  # there are no states: nothing lies outside of pages
        for chunk in chunks:
            slot = chunk.running.slot
            before = self.states.get(slot, ()) if chunk.restored == UNMAPPED else self.copies[chunk.restored]
            text = tuple(chunk.running.sequence.tokens)
            assert chunk.start == 0 or before == text[: chunk.start], "a state of something else"
            self.states[slot] = text[: chunk.start + chunk.count]
        for chunk in chunks:
            if chunk.saved != UNMAPPED:
                self.copies[chunk.saved] = self.states[chunk.running.slot]

    def check_reads(self, running: RunningSequence, until: int) -> None:
        """What was found in pages is what this text would compute."""
        tokens = tuple(running.sequence.tokens)
        for position in range(until):
            assert self.written[0, running.pages[position // PAGE], position % PAGE] == tokens[: position + 1]
        self.check_window(running, until)

    def check_window(self, running: RunningSequence, at: int) -> None:
        """What a query at a position sees through windows is what this text would compute."""
        tokens = tuple(running.sequence.tokens)
        computed = running.last_position if running.prefilled else running.filled
        for n, group in enumerate(self.scheduler.groups[1:], 1):
            assert group.window is not None
            for position in range(max(0, at - group.window + 1), min(at, computed)):
                page = running.groups[n].columns[position // PAGE]
                assert self.written[n, page, position % PAGE] == tokens[: position + 1]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 16)), min_size=1, max_size=14),
    pages=st.integers(13, 30),
    prefix_cache=st.booleans(),
    tapping=st.sampled_from([(), ("eagle3",)]),
    window=st.sampled_from([None, 1, 3, 7, 30]),
    snapshots=st.sampled_from([None, 0, 1, 4]),
)
def test_everybody_is_served(
    seed: int,
    sizes: list[tuple[int, int]],
    pages: int,
    prefix_cache: bool,
    tapping: tuple[str, ...],
    window: int | None,
    snapshots: int | None,
):
    simulate(make(pages, prefix_cache, tapping, window, snapshots), np.random.default_rng(seed), sizes)


def simulate(scheduler: Scheduler, rng: np.random.Generator, sizes: Sequence[tuple[int, int]]) -> None:
    """Serves requests of these lengths, prompt and answer, which begin alike and come in random portions."""
    simulation = Simulation(scheduler, rng)
    waiting = [
        sequence(n, [*[1] * (prompt // 2), *rng.integers(0, 2, prompt - prompt // 2).tolist()], new)
        for n, (prompt, new) in enumerate(sizes)
    ]
    submitted: list[TokenSequence] = []
    for _ in range(2000):
        if waiting and rng.integers(3):
            submitted.append(waiting.pop(0))
            scheduler.wait(submitted[-1])
        simulation.step()
        numbers = [each.number for each in scheduler.waiting]
        assert numbers == sorted(numbers)
        assert scheduler.waiting_tokens == sum(each.queued for each in scheduler.waiting)
        if not waiting and not scheduler.busy and not simulation.flight:
            break
    assert sorted(simulation.done) == list(range(len(sizes)))
    assert not any(any(group.pages.ref_counts) for group in scheduler.groups)
    assert scheduler.waiting_tokens == 0
    if (kept := scheduler.snapshots) is not None:
        assert not any(kept.held)
        assert sorted([*kept.empty, *kept.published.values()]) == list(range(kept.count))


def take_any(kept: Snapshots) -> int:
    """The place of the snapshot that was used the longest ago, whether or not a sequence is still to begin with it."""
    return kept.empty.pop() if kept.empty else kept.published.popitem(last=False)[1]


def key_of_the_page_before(scheduler: Scheduler, running: RunningSequence, end: int) -> bytes:
    return running.sequence.page_key(max(0, end // PAGE - 2), PAGE)


def any_page_ends_a_prefix(groups: Sequence[PageGroup], keys: Callable[[int], bytes], most: int, *ends: Any) -> list[bytes]:
    """The longest prefix that the first group has, whatever the others lack."""
    return usable_prefix(groups[:1], keys, most, *ends)


def one_column_too_many(window: int | None, position: int, page_size: int) -> int:
    return 0 if window is None else max(0, position - window + 1) // page_size + 1


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "a held snapshot is given away": (Snapshots, "take", take_any),
    "a snapshot is found at another page": (Scheduler, "key_before", key_of_the_page_before),
    "a window's pages are not asked for": (scheduler_module, "usable_prefix", any_page_ends_a_prefix),
    "a window's pages are given up too early": (groups_module, "first_column", one_column_too_many),
}


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_mistake_in_groups_or_snapshots_is_seen(mutant: str | None, monkeypatch: pytest.MonkeyPatch):
    """By the simulation, which serves everybody without it."""
    if mutant is not None:
        monkeypatch.setattr(*MUTANTS[mutant])
    seen = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = [(int(prompt), 6) for prompt in rng.integers(12, 30, 12)]
        scheduler = make(30, window=5 if seed % 2 else None, snapshots=1 + seed // 2 % 2)
        try:
            simulate(scheduler, rng, sizes)
        except (AssertionError, KeyError):
            seen += 1
    assert (seen > 0) is (mutant is not None)


def test_a_prompt_stops_where_it_parts_from_another_and_at_its_last_page():
    scheduler = make(40, snapshots=2)
    alike = [1] * 12
    found = []
    for number, rest in enumerate((2, 3, 4)):
        scheduler.wait(sequence(number, [*alike, *[rest] * 12], 4))
        (running,) = scheduler.admit()
        found.append((running.filled, running.stops))
        prefill(scheduler)
        scheduler.leave(running)
    assert found == [(0, (20,)), (0, (8, 20)), (8, (20,))]
    assert scheduler.snapshots is not None
    assert not scheduler.snapshots.empty


def test_the_newest_gives_way_and_comes_back_first():
    scheduler = make(6)
    for number, length in ((0, 7), (1, 7), (2, 3)):
        scheduler.wait(sequence(number, list(range(length)), 12))
    old, young = scheduler.admit()
    assert (old.sequence.number, young.sequence.number) == (0, 1)
    chunks = scheduler.next_chunks()
    assert [chunk.running for chunk in chunks] == [old, young]
    for chunk in chunks:
        scheduler.on_prefilled(chunk)
    batch, rounds = scheduler.make_room(scheduler.runnable(), 2, WIDTH)
    assert (batch, rounds) == ([old], 1)
    assert [each.number for each in scheduler.waiting] == [1, 2]
    assert (young.sequence.handle.preemptions, scheduler.preemptions) == (1, 1)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([40, 300, 50, 60, 30], [[39, 49, 59, 29], [256], [43]]),  # all short ones at once, before what is long but not older
        ([300, 40, 50, 60, 30], [[256], [43, 39, 49, 59], [16], [13]]),
        ([10, 12], [[9], [11]]),  # so short that apart they are less work
        ([60, 60], [[59], [59]]),
        ([60, 60, 60], [[59, 59, 59]]),
    ],
)
def test_short_prompts_are_computed_together_where_that_is_less_work(lengths: list[int], sizes: list[list[int]]):
    table = ShapeTable(batches=(1, 8), capacities=(512,), chunks=(16, 64, 256))
    assert table.together == (4, 64)
    scheduler = Scheduler(table, Pages(64, 64), 512, False)
    for number, length in enumerate(lengths):
        scheduler.wait(sequence(number, [1] * length, 8))
    scheduler.admit()
    found = []
    while chunks := scheduler.next_chunks():
        found.append([chunk.count for chunk in chunks])
        for chunk in chunks:
            scheduler.on_prefilled(chunk)
    assert found == sizes


def test_rounds_are_fewer_before_anybody_gives_way():
    scheduler = make(5)
    scheduler.wait(sequence(0, [1, 2, 3], 40))
    (running,) = scheduler.admit()
    (chunk,) = scheduler.next_chunks()
    scheduler.on_prefilled(chunk)
    assert scheduler.make_room([running], 8, WIDTH) == ([running], 2)
    assert len(running.pages) == 4


def test_a_context_that_fell_behind_keeps_no_page_beyond_it():
    scheduler = make(12, tapping=("eagle3",))
    first = sequence(0, list(range(9)), 12)
    scheduler.wait(first)
    (running,) = scheduler.admit()
    prefill(scheduler)
    scheduler.on_dispatched([running], 2, 2 * WIDTH)
    scheduler.on_completed(running, 2, 2 * WIDTH, 8, "ngram")
    first.processor.add_round(list(range(9, 17)), 0, 0, ())
    scheduler.leave(running)
    again = sequence(1, list(range(17)), 4)
    scheduler.wait(again)
    (running,) = scheduler.admit()
    assert running.filled == 8, "the prompt's full pages, and none of those that only the target has"


def test_a_page_is_found_by_the_next_request_once_it_was_sent():
    scheduler = make(12)
    scheduler.wait(sequence(0, list(range(10)), 4))
    scheduler.wait(sequence(1, list(range(10)), 4))
    first, second = scheduler.admit()
    assert (first.filled, second.filled) == (0, 0), "nothing was computed yet"
    prefill(scheduler)
    scheduler.wait(sequence(2, list(range(10)), 4))
    (third,) = scheduler.admit()
    assert third.filled == 8
    assert third.pages[:2] == first.pages[:2]
    assert third.sequence.handle.cached_tokens == 8
    assert scheduler.prefix_hits == 8


class Hashed:
    """Stands before the hash function, and counts the tokens that go through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.tokens = 0
        self.real = pages_module.hashlib.blake2b
        monkeypatch.setattr(pages_module.hashlib, "blake2b", self)

    def __call__(self, data: bytes, digest_size: int) -> object:
        self.tokens += len(data) // 4
        return self.real(data, digest_size=digest_size)


def prefill(scheduler: Scheduler) -> None:
    """Computes all prompts that have a slot."""
    while chunks := scheduler.next_chunks():
        for chunk in chunks:
            scheduler.on_prefilled(chunk)


def run_alone(scheduler: Scheduler, sequence: TokenSequence) -> None:
    """Prefills and generates a token a round, until it has ended."""
    scheduler.wait(sequence)
    (running,) = scheduler.admit()
    prefill(scheduler)
    while sequence.processor.finish_reason is None:
        scheduler.make_room([running], 1, WIDTH)
        scheduler.on_dispatched([running], 1, WIDTH)
        scheduler.on_completed(running, 1, WIDTH, 1)
        sequence.processor.add_round([len(sequence.processor.tokens)], 0, 0, ())
    scheduler.leave(running)


def test_each_page_of_a_text_is_hashed_once_however_many_pieces_it_comes_in(monkeypatch: pytest.MonkeyPatch):
    table = ShapeTable(batches=(1,), capacities=(4096,), chunks=(8, 16))
    most = PAGE + 1 + 4  # a page, the token behind it, and the key of the one before
    for length in (500, 1000, 2000):
        hashed = Hashed(monkeypatch)
        scheduler = Scheduler(table, Pages(1024, PAGE), 4096, True)
        request = sequence(0, list(range(length)), 30)
        run_alone(scheduler, request)
        monkeypatch.undo()
        assert 0 < hashed.tokens <= most * (length + 30) / PAGE
        again = sequence(1, [*request.tokens, 5], 4)
        scheduler.wait(again)
        (running,) = scheduler.admit()
        assert running.filled == (length + 29) // PAGE * PAGE, "what was generated is found, too"


def test_a_blocked_head_of_the_queue_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    scheduler = make(12)
    scheduler.wait(sequence(0, list(range(30)), 10))
    (first,) = scheduler.admit()
    prefill(scheduler)
    scheduler.wait(sequence(1, [*range(29), *range(14)], 4))
    hashed = Hashed(monkeypatch)
    assert scheduler.admit() == []
    once = hashed.tokens
    assert once > 0
    for _ in range(50):
        assert scheduler.admit() == []
    assert hashed.tokens == once
    scheduler.leave(first)
    (second,) = scheduler.admit()
    assert second.filled == 28, "what they share was found"
