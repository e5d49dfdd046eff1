"""Denoising over four devices: the tokens of one, and the same salient positions in every layer of every step."""

from typing import Any

import numpy as np
import pytest

from decode.diffusion.support import REPAIRED, asking, build
from reference.diffusion_cases import PROMPT
from tilewright.decode.diffusion.model import DiffusionModel
from tilewright.decode.diffusion.programs import DiffusionTable
from tilewright.parallel.mesh import make_mesh

TABLE = DiffusionTable(batches=(2,), positions=(32,), responses=(16,), blocks=(4,), buckets=(12,))
PROMPTS = [PROMPT, PROMPT[:3]]


@pytest.fixture(scope="module")
def models() -> list[DiffusionModel]:
    """On one device, and on four."""
    return [build("llada", "xla", TABLE, mesh=mesh) for mesh in (None, make_mesh({"tp": 4}))]


@pytest.mark.parametrize(
    "way",
    [
        {"mode": "sparse", "saliency": REPAIRED},
        pytest.param({"mode": "sparse", "saliency": REPAIRED, "threshold": 0.3, "guidance": 1.0}, marks=pytest.mark.slow),
        pytest.param({"mode": "dual"}, marks=pytest.mark.slow),
        {"mode": "dense"},
    ],
    ids=["sparse", "guided", "dual", "dense"],
)
def test_four_devices_give_what_one_does(models: list[DiffusionModel], way: dict[str, Any]):
    one, four = (model.start(PROMPTS, asking(**way)) for model in models)
    while not one.finished:
        one.advance()
        four.advance()
    assert one.tokens() == four.tokens()
    assert len(one.reports) == len(four.reports) > 3
    for ours, theirs in zip(one.reports, four.reports, strict=True):
        assert ours.span == theirs.span
        np.testing.assert_array_equal(ours.salient, theirs.salient)
    if way["mode"] == "dense":
        return
    layer = four.state.caches[0]
    assert layer.k.sharding.shard_shape(layer.k.shape)[2] == 1, "each device holds the keys of its own head"


def test_a_mesh_that_does_not_fit():
    with pytest.raises(ValueError, match="expected a mesh with the axis 'tp', found nodes"):
        build("llada", mesh=make_mesh({"nodes": 4}))
    with pytest.raises(ValueError, match="expected an axis 'tp' that divides the 4 key/value heads, found 8 devices"):
        build("llada", mesh=make_mesh({"tp": 8}))
