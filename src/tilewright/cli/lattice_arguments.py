"""Arguments of `tilewright train drafter` for DSpark and LiLiCorr, which walk through candidates."""

from tilewright.cli.common import given
from tilewright.cli.options import option_class
from tilewright.models import convolution, dspark, lilicorr
from tilewright.models.dflash import DFlashConfig
from tilewright.models.dspark import DSparkConfig
from tilewright.models.lilicorr import LiLiCorrConfig


@option_class
class DSparkArguments:
    """Arguments of --kind dspark alone, besides those of --kind dflash.

    Attributes:
        markov_rank: dspark: the inner size of the serial head (256 by default).
        markov_top_k: dspark: candidates of a slot that the serial head is asked about when drafting (16 by default).
        l1_weight: dspark: share of the L1 distance to the target's distribution in the loss, from 0 to 1 (0.9 by default).
    """

    markov_rank: int | None = None
    markov_top_k: int | None = None
    l1_weight: float | None = None

    def config(self, backbone: DFlashConfig) -> DSparkConfig:
        made = DSparkConfig(
            **{**vars(backbone), "sample_from_anchor": True},
            markov_rank=given(self.markov_rank, 256),
            candidate_top_k=given(self.markov_top_k, min(dspark.TOP_K, backbone.proposed)),
        )
        return dspark.config_from_hf(dspark.config_to_hf(made), "the drafter's sizes")


@option_class
class LiLiCorrArguments:
    """Arguments of --kind lilicorr alone, besides those of --kind dflash.

    Attributes:
        lattice_top_k: lilicorr: candidates of a slot (8 by default).
        lattice_size: lilicorr: hidden size of the transformer over the candidates; by default a quarter of the target's, the
            published ratio, as far as its heads divide that.
        lattice_layers: lilicorr: its layers (2 by default).
        lattice_heads: lilicorr: its heads (8 by default).
        lattice_conv: lilicorr: with DFlash 2's convolutions around the drafter's layers.
        lattice_weight: lilicorr: of its cross-entropy against the backbone's loss (0.25 by default).
        penalty_weight: lilicorr: of what it gives to candidates that the target finds unlikely (0.25 by default).
    """

    lattice_top_k: int | None = None
    lattice_size: int | None = None
    lattice_layers: int | None = None
    lattice_heads: int | None = None
    lattice_conv: bool | None = None
    lattice_weight: float | None = None
    penalty_weight: float | None = None

    def config(self, backbone: DFlashConfig) -> LiLiCorrConfig:
        heads = given(self.lattice_heads, 8)
        size = given(self.lattice_size, max(backbone.hidden_size // 4 // max(heads, 1), 1) * heads)
        made = LiLiCorrConfig(
            **vars(backbone),
            candidate_top_k=given(self.lattice_top_k, 8),
            lattice_size=size,
            lattice_layers=given(self.lattice_layers, 2),
            lattice_heads=heads,
            mlp_ratio=2.0,
            vector_size=size,
            vector_eps=1e-4,
            logit_scale=8.0,
            **(dict(zip(convolution.SIZES, (2, 16), strict=True)) if self.lattice_conv else {}),
        )
        return lilicorr.config_from_hf(lilicorr.config_to_hf(made), "the drafter's sizes")
