"""Reference of DSpark, in NumPy float64: forward, walk and loss, written from the description of the method.

What it has in common with DFlash, and with the other drafters that walk, is in `dflash_numpy.py` and `dflash2_numpy.py`.

Source: DSpark (arXiv 2607.05147) and deepseek-ai/DeepSpec, `deepspec/modeling/dspark`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.dflash2_numpy import Choose, Walker, softmax
from reference.dflash_numpy import Array, Pair, Target


class DSpark(Walker):
    """A DSpark drafter: slot j stands at the known token's position + j, and drafts the token behind it."""

    first_slot = 0

    def candidate_count(self) -> int:
        return self.field("candidate_top_k", 16)

    def serial(self, before: int) -> Array:
        """Returns the serial head's addition to the logits of the proposable tokens, `[W]`."""
        first, second = (
            self.tensors[name if name in self.tensors else f"{name}.weight"].astype(np.float64)
            for name in ("markov_head.markov_w1", "markov_head.markov_w2")
        )
        return second @ first[before]

    def chooser(self, hidden: Array, features: Array, start: int) -> Choose:
        logits = self.target.head(hidden)

        def choose(slot: int, before: int) -> tuple[list[int], Array]:
            tokens = self.candidates(logits[slot])
            return tokens, logits[slot][tokens] + self.serial(before)[[self.ids.index(token) for token in tokens]]

        return choose


@dataclass(frozen=True)
class Losses:
    """Sums over the slots of a block: weight times cross-entropy in nats, weight times L1 distance, and weights."""

    nll: float
    l1: float
    weight: float


def block_losses(
    drafter: DSpark, hidden: Array, said: Array, tokens: Sequence[int], counted: Sequence[bool], gamma: float
) -> Losses:
    """The losses of a block whose slots should draft `tokens[1:]`, the known token being `tokens[0]`.

    Args:
        hidden: normalised, of every slot.
        said: the target's logits at every slot's position, `[n, V]`.
        counted: whether each slot is in the loss.
    """
    logits = drafter.target.head(hidden)
    sums = np.zeros(3)
    for slot, counts in enumerate(counted):
        if counts:
            p = softmax(logits[slot] + drafter.serial(tokens[slot]))
            apart = np.abs(p - softmax(said[slot])).sum()
            sums += math.exp(-slot / gamma) * np.array([-math.log(p[tokens[slot + 1]]), apart, 1.0])
    return Losses(*sums)


def as_dspark(
    pair: Pair, seed: int = 0, *, rank: int = 6, top_k: int = 5, strength: float = 1.0, plain_names: bool = False, **fields: Any
) -> Pair:
    """The pair with a DSpark drafter around the same backbone, for blocks of as many tokens, its serial head random.

    Args:
        plain_names: the serial head's tensors are stored without `.weight`.
        fields: more of its configuration.
    """
    rng = np.random.default_rng(seed)
    config = dict(pair.drafter_config)
    inner = config.pop("dflash_config")
    tensors = dict(pair.drafter_tensors)
    for name, gain in (("markov_w1", 1.0), ("markov_w2", strength)):
        stored = f"markov_head.{name}{'' if plain_names else '.weight'}"
        tensors[stored] = (gain * rng.normal(size=(config["vocab_size"], rank))).astype(np.float32)
    made = (
        config
        | inner
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": config["block_size"] - 1,
            "markov_rank": rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "candidate_top_k": top_k,
        }
    )
    return replace(pair, drafter_config=made | fields, drafter_tensors=tensors)


def build_dspark(pair: Pair) -> tuple[Target, DSpark]:
    target = Target(pair.target_config, pair.target_tensors)
    return target, DSpark(pair.drafter_config, pair.drafter_tensors, target)
