"""Environment variables of the Neuron runtime and compiler that training with overlap wants, and what each does.

Source: neuron-runtime/explore/compute-comm-overlap of the AWS Neuron documentation, which calls these experimental.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.hardware.ranged import refuse_name
from tilewright.perfmodel.machine import CC_PACKET_BYTES, DMA_PACKET_BYTES

FRAMEWORKS = ("jax", "nxd")
AXES = ("fsdp", "tp")


@dataclass(frozen=True)
class Variable:
    """An environment variable with a value.

    Attributes:
        frameworks: that read it.
        does: what it changes.
    """

    name: str
    value: str
    frameworks: tuple[str, ...]
    does: str

    @property
    def line(self) -> str:
        """Line of a shell that sets the variable."""
        return f"export {self.name}={self.value}"


def recommended_packets(streams: int) -> tuple[int, tuple[int, ...]]:
    """Packet sizes of compute's transfers and of each stream's that the source recommends: whole ones for compute and for
    tensor-parallel collectives with a stream of their own, the smallest for the rest."""
    return CC_PACKET_BYTES, ((CC_PACKET_BYTES, DMA_PACKET_BYTES) if streams > 1 else (DMA_PACKET_BYTES,))


def variables(
    threaded: bool = True,
    streams: int = 2,
    prefetch_distance: int | None = None,
    scatter_delay: int | None = None,
    packets: tuple[int, tuple[int, ...]] | None = None,
) -> list[Variable]:
    """Environment variables that stand for a set of choices.

    Args:
        threaded: token threading.
        streams: of collectives; the source knows one and two.
        prefetch_distance, scatter_delay: shifts, in halves of layers; None leaves the default.
        packets: sizes of compute's packets and of each stream's; None, or the defaults, leave them.
    """
    found = []
    if threaded:
        found.append(
            Variable(
                "NEURON_FSDP", "1", ("jax",), "token threading: collectives stay in the order of a chain of one-element tokens"
            )
        )
    if threaded and streams > 1:
        found.append(
            Variable(
                "NEURON_FSDP_CC_MULTISTREAM", "1", ("jax",), "streams: tensor-parallel collectives on 0, fully sharded on 1"
            )
        )
    if threaded:
        both = "token threading and, with it, streams" if streams > 1 else "token threading (it turns streams on as well)"
        found.append(Variable("NEURON_NXD_FSDP_CC_MULTISTREAM", "1", ("nxd",), both))
    shifts = (
        ("EARLY_AG", prefetch_distance, "gathers weights so many halves of layers ahead"),
        ("LATE_RS", scatter_delay, "scatters gradients so many halves of layers behind"),
    )
    for name, shift, does in shifts:
        if threaded and shift is not None:
            said = f"{does}: attention and MLP count as a layer each here"
            found.append(Variable(f"NEURON_FSDP_NUM_LAYER_{name}_SHIFT", str(shift), FRAMEWORKS, said))
    if packets is not None and packets != (DMA_PACKET_BYTES, (CC_PACKET_BYTES,)):
        dma, cc = packets
        said = f"packets of compute's DMA, {DMA_PACKET_BYTES} by default: larger ones raise its share; not for DGE"
        found.append(Variable("NEURON_RT_DBG_DMA_PACKETIZATION_SIZE", str(dma), FRAMEWORKS, said))
        said = f"packets of collectives' copies by stream, {CC_PACKET_BYTES} by default: smaller ones lower their share"
        found.append(Variable("NEURON_RT_DBG_CC_DMA_PACKET_SIZE", ",".join(map(str, cc)), FRAMEWORKS, said))
    return found


def recommended(axes: Sequence[str]) -> dict[str, list[Variable]]:
    """For each framework what the source recommends for training over these axes.

    Raises:
        ValueError: an axis that is none of `AXES`, or none.
    """
    for axis in axes:
        if axis not in AXES:
            refuse_name("axes to train over", axis, AXES)
    if "fsdp" not in axes:
        raise ValueError("expected fsdp among the axes, for what there is to set concerns fully sharded training; found none")
    streams = 2 if "tp" in axes else 1
    found = variables(True, streams, 1, 2, recommended_packets(streams))
    return {name: [one for one in found if name in one.frameworks] for name in FRAMEWORKS}


def as_record(found: Sequence[Variable]) -> list[Mapping[str, str]]:
    """Plain data."""
    return [{"name": one.name, "value": one.value, "does": one.does} for one in found]
