"""Environment variables of the Neuron runtime and compiler for training with overlapped communication.

Source: neuron-runtime/explore/compute-comm-overlap of the AWS Neuron documentation, which calls the variables experimental.
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
        frameworks: frameworks that read the variable.
        does: effect of the variable.
    """

    name: str
    value: str
    frameworks: tuple[str, ...]
    does: str

    @property
    def line(self) -> str:
        """Shell command that sets the variable."""
        return f"export {self.name}={self.value}"


def recommended_packets(streams: int) -> tuple[int, tuple[int, ...]]:
    """Returns the packet sizes that the source recommends, for compute's transfers and for each stream.

    Compute, and tensor-parallel collectives with a separate stream, get the largest packets; other streams get the smallest.
    """
    return CC_PACKET_BYTES, ((CC_PACKET_BYTES, DMA_PACKET_BYTES) if streams > 1 else (DMA_PACKET_BYTES,))


def variables(
    threaded: bool = True,
    streams: int = 2,
    prefetch_distance: int | None = None,
    scatter_delay: int | None = None,
    packets: tuple[int, tuple[int, ...]] | None = None,
) -> list[Variable]:
    """Returns the environment variables of a training setting.

    Args:
        threaded: token threading.
        streams: number of collective streams; the source has one and two.
        prefetch_distance, scatter_delay: shifts in half layers; None for the default.
        packets: packet sizes of compute and of each stream; None for the defaults.
    """
    found = []
    if threaded:
        found.append(
            Variable(
                "NEURON_FSDP", "1", ("jax",), "token threading: a chain of one-element tokens fixes the order of collectives"
            )
        )
    if threaded and streams > 1:
        found.append(
            Variable(
                "NEURON_FSDP_CC_MULTISTREAM",
                "1",
                ("jax",),
                "tensor-parallel collectives on stream 0, fully sharded ones on 1",
            )
        )
    if threaded:
        both = "token threading and streams" if streams > 1 else "token threading (also enables streams)"
        found.append(Variable("NEURON_NXD_FSDP_CC_MULTISTREAM", "1", ("nxd",), both))
    shifts = (
        ("EARLY_AG", prefetch_distance, "prefetch distance of weights in half layers"),
        ("LATE_RS", scatter_delay, "reduce-scatter delay of gradients in half layers"),
    )
    for name, shift, does in shifts:
        if threaded and shift is not None:
            text = f"{does} (the variable counts attention and MLP as a layer each)"
            found.append(Variable(f"NEURON_FSDP_NUM_LAYER_{name}_SHIFT", str(shift), FRAMEWORKS, text))
    if packets is not None and packets != (DMA_PACKET_BYTES, (CC_PACKET_BYTES,)):
        dma, cc = packets
        text = f"packet bytes of compute's DMA, default {DMA_PACKET_BYTES}: larger packets raise its share; not for DGE"
        found.append(Variable("NEURON_RT_DBG_DMA_PACKETIZATION_SIZE", str(dma), FRAMEWORKS, text))
        text = f"packet bytes of collectives' copies by stream, default {CC_PACKET_BYTES}: smaller packets lower their share"
        found.append(Variable("NEURON_RT_DBG_CC_DMA_PACKET_SIZE", ",".join(map(str, cc)), FRAMEWORKS, text))
    return found


def recommended(axes: Sequence[str]) -> dict[str, list[Variable]]:
    """Returns the recommended variables of each framework for training over the given axes.

    Raises:
        ValueError: an axis is not in `AXES`, or `fsdp` is missing.
    """
    for axis in axes:
        if axis not in AXES:
            refuse_name("axes to train over", axis, AXES)
    if "fsdp" not in axes:
        raise ValueError("expected fsdp among the axes, because all variables concern fully sharded training; found none")
    streams = 2 if "tp" in axes else 1
    found = variables(True, streams, 1, 2, recommended_packets(streams))
    return {name: [one for one in found if name in one.frameworks] for name in FRAMEWORKS}


def as_record(found: Sequence[Variable]) -> list[Mapping[str, str]]:
    """Returns variables as plain data."""
    return [{"name": one.name, "value": one.value, "does": one.does} for one in found]
