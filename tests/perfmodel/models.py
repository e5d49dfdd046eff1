"""Models and machines that tests of the simulator share."""

from dataclasses import dataclass
from math import inf

from tilewright.hardware.neuron import instance_of
from tilewright.perfmodel.machine import Machine, Settings, machine_of, with_machine_constants


@dataclass(frozen=True)
class Sizes:
    """What programs ask of a decoder's configuration."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 128256
    tie_word_embeddings: bool = False
    mixture: None = None
    delta: None = None
    global_heads: None = None


LLAMA_8B = Sizes()
LLAMA_70B = Sizes(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
SMALL = Sizes(hidden_size=1024, intermediate_size=4096, num_layers=2, num_heads=16, num_kv_heads=8, vocab_size=4096)


def inferentia(ranks: int, **settings: object) -> Machine:
    return machine_of(instance_of("inf2.48xlarge"), Settings(**settings), tp=ranks)  # type: ignore[arg-type]


def trainium(**settings: object) -> Machine:
    return machine_of(instance_of("trn2.48xlarge"), Settings(**settings), fsdp=16, tp=4)  # type: ignore[arg-type]


def without_limits(machine: Machine) -> Machine:
    """No latency, and all bandwidth that there could be."""
    free = {"hop_us": 0.0, "pass_us": 0.0, "signal_us": 0.0, "dma_gb_per_s": inf, "hbm_gb_per_s": inf, "link_gb_per_s": inf}
    return with_machine_constants(machine, free)
