"""Rows that come and go while others run: each gives what it gives alone."""

from itertools import permutations
from typing import Any

import jax
import numpy as np
import pytest

from decode.support import prompts
from reference.dflash_numpy import as_folders, random_pair
from reference.eagle3_numpy import as_folder, random_eagle3
from tilewright.decode.batch import Batch
from tilewright.decode.language_model import LanguageModel, load
from tilewright.decode.request import Request
from tilewright.decode.sampling import Sampling
from tilewright.decode.shapes import Shape, ShapeTable
from tilewright.models.tokenizer import StreamDecoder

VOCAB, BLOCK = 16, 4
TABLE = ShapeTable(batches=(1, 4), capacities=(64,), chunks=(8,))
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=1, drafter_layers=1, taps=[0], block_size=BLOCK)
EAGLE3 = random_eagle3(0, PAIR.target_config, taps=[0], draft_vocab_size=12)
ASKED = prompts(0, [1, 21, 9, 2, 33, 14], vocab=VOCAB)
REQUESTS = [
    Sampling(9), Sampling(5, temperature=1.0, seed=1), Sampling(14), Sampling(1), Sampling(31, temperature=0.7, seed=2),
    Sampling(7),
]  # fmt: skip
KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "dflash": ("dflash", {"block_size": BLOCK}),
    "dflash, ring": ("dflash", {"block_size": BLOCK, "draft_window": 3}),
    "eagle3": ("eagle3", {"block_size": BLOCK}),
    "eagle3, ring": ("eagle3", {"block_size": BLOCK, "draft_window": 3}),
    "ngram": ("ngram", {"block_size": BLOCK}),
}

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    folder = tmp_path_factory.mktemp("models")
    target, dflash = as_folders(folder, PAIR)
    return {"target": target, "dflash": dflash, "eagle3": as_folder(folder / "eagle3", *EAGLE3), "ngram": "ngram", None: None}


@pytest.fixture(scope="module")
def alone(folders: dict[str | None, Any]) -> list[list[int]]:
    lm = load(folders["target"], table=TABLE)
    return [lm.generate([prompt], request)[0].tokens for prompt, request in zip(ASKED, REQUESTS, strict=True)]


def request(lm: LanguageModel, n: int) -> Request:
    return Request(n, ASKED[n], REQUESTS[n], StreamDecoder(lm.tokenizer))


def in_turn(lm: LanguageModel, order: tuple[int, ...], rows: tuple[int, ...], pause: int) -> list[list[int]]:
    """Tokens of all requests, which wait in `order` for one of `rows`; `pause` rounds lie between two admissions."""
    batch, waiting, running, ended = Batch(lm.programs, Shape(4, 64, "plain"), lm.drafter), list(order), {}, {}
    for number in range(400):
        free = [row for row in rows if row not in running]
        if waiting and free and number % pause == 0:
            running[free[-1]] = request(lm, waiting.pop(0))
            batch.admit({free[-1]: running[free[-1]]})
        if not running and not waiting:
            break
        for row, own in list(running.items()):
            assert batch.done[row] == (own.finish_reason is not None)
        infos = batch.advance(1)
        for tokens, settled, drafted, accepted in zip(*infos[:4], strict=True):
            for row, own in list(running.items()):
                own.add_round(tokens[row, : settled[row]].tolist(), int(drafted[row]), int(accepted[row]), ())
                if own.finish_reason is not None:
                    ended[own.index] = running.pop(row)
    return [ended[n].tokens for n in range(len(ASKED))]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_admitted_while_others_run(folders: dict[str | None, Any], alone: list[list[int]], kind: str):
    """Short and long prompts, greedy and drawn, in all orders of three, into fresh rows and into rows that others left.

    One request fills its row to the last position.
    """
    source, settings = KINDS[kind]
    lm = load(folders["target"], folders[source], table=TABLE, **settings)
    for n, first in enumerate(permutations((1, 4, 5))):
        order = (*first, 0, 2, 3)
        assert in_turn(lm, order, ((0, 1, 2, 3), (3, 1), (2,))[n % 3], 1 + n % 2) == alone
    assert in_turn(lm, (0, 1, 2, 3, 4, 5), (0, 2, 3), 3) == alone


def test_the_rows_that_run_are_not_touched_by_an_admission(folders: dict[str | None, Any]):
    lm = load(folders["target"], folders["dflash"], block_size=BLOCK, draft_window=3, table=TABLE)
    batch = Batch(lm.programs, Shape(4, 64, "plain"), lm.drafter)
    batch.admit({1: request(lm, 2)})
    batch.advance(2)

    def rows(which: list[int]) -> list[np.ndarray]:
        return [np.asarray(leaf)[which] for leaf in jax.tree.leaves(batch.device_state)]

    before = rows([0, 1, 3])
    batch.admit({2: request(lm, 4)})
    for old, new in zip(before, rows([0, 1, 3]), strict=True):
        np.testing.assert_array_equal(new, old)
    assert batch.done.tolist() == [True, False, False, True]


def test_requests_that_the_shape_does_not_serve(folders: dict[str | None, Any]):
    lm = load(folders["target"], table=TABLE)
    batch = Batch(lm.programs, Shape(4, 64, "greedy"), None)
    with pytest.raises(ValueError, match="the batch's programs are for greedy sampling, found plain"):
        batch.admit({0: request(lm, 1)})
    with pytest.raises(ValueError, match="expected a request of at most 64 positions, found one of 65"):
        batch.admit({0: Request(0, [1] * 33, Sampling(32), StreamDecoder(lm.tokenizer))})
    assert not lm.programs.compiled
